"""What the registry says to etcd: the part it needs of etcd's v3 API, as protobuf messages.

Names and numbers are those of the API; fields that are not listed here are passed over in answers.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "corolla.etcd"
_MESSAGES = {
    "ResponseHeader": "uint64 cluster_id = 1; int64 revision = 3",
    "KeyValue": "bytes key = 1; bytes value = 5; int64 lease = 6",
    "RangeRequest": "bytes key = 1; bytes range_end = 2; bool keys_only = 8",
    "RangeResponse": "ResponseHeader header = 1; repeated KeyValue kvs = 2",
    "PutRequest": "bytes key = 1; bytes value = 2; int64 lease = 3",
    "DeleteRangeRequest": "bytes key = 1",
    "Compare": "int32 result = 1; int32 target = 2; bytes key = 3; int64 version = 4; int64 lease = 8",
    "RequestOp": "PutRequest request_put = 2; DeleteRangeRequest request_delete_range = 3; TxnRequest request_txn = 4",
    "ResponseOp": "TxnResponse response_txn = 4",
    "TxnRequest": "repeated Compare compare = 1; repeated RequestOp success = 2; repeated RequestOp failure = 3",
    "TxnResponse": "bool succeeded = 2; repeated ResponseOp responses = 3",
    "LeaseGrantRequest": "int64 TTL = 1",
    "LeaseGrantResponse": "int64 ID = 2; int64 TTL = 3",
    "LeaseKeepAliveRequest": "int64 ID = 1",
    "LeaseKeepAliveResponse": "int64 TTL = 3",
    "WatchCreateRequest": "bytes key = 1; bytes range_end = 2; int64 start_revision = 3",
    "WatchRequest": "WatchCreateRequest create_request = 1",
    "Event": "int32 type = 1; KeyValue kv = 2",
    "WatchResponse": "bool canceled = 4; int64 compact_revision = 5; repeated Event events = 11",
}
_FIELD = re.compile(r"(?P<repeated>repeated )?(?P<type>\w+) (?P<name>\w+) = (?P<number>\d+)")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
}

EQUAL = 0
"""A result of Compare."""
VERSION, LEASE = 0, 4
"""Targets of Compare; the version of a key that does not exist is 0."""
DELETED = 1
"""A type of Event."""


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="corolla/etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for match in _FIELD.finditer(fields):
            label = _Field.LABEL_REPEATED if match["repeated"] else _Field.LABEL_OPTIONAL
            field = message.field.add(name=match["name"], number=int(match["number"]), label=label)
            if match["type"] in _SCALARS:
                field.type = _SCALARS[match["type"]]
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{match['type']}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


_classes = _message_classes()
RangeRequest = _classes["RangeRequest"]
RangeResponse = _classes["RangeResponse"]
PutRequest = _classes["PutRequest"]
DeleteRangeRequest = _classes["DeleteRangeRequest"]
Compare = _classes["Compare"]
RequestOp = _classes["RequestOp"]
TxnRequest = _classes["TxnRequest"]
TxnResponse = _classes["TxnResponse"]
LeaseGrantRequest = _classes["LeaseGrantRequest"]
LeaseGrantResponse = _classes["LeaseGrantResponse"]
LeaseKeepAliveRequest = _classes["LeaseKeepAliveRequest"]
LeaseKeepAliveResponse = _classes["LeaseKeepAliveResponse"]
WatchCreateRequest = _classes["WatchCreateRequest"]
WatchRequest = _classes["WatchRequest"]
WatchResponse = _classes["WatchResponse"]
