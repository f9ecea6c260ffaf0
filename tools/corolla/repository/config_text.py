"""A model's config.pbtxt as people read it: comments on top, and one line for each thing that fits into one."""

from google.protobuf import text_format
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

from corolla.repository.command import init_command
from corolla.repository.plan import RepositoryPlan
from corolla.repository.stamp import stamped

_WIDTH = 120
_FIRST = ("name", "backend", "platform", "max_batch_size")
_LAST = "parameters"

_PURPOSES = {
    "embed": "token ids to hidden states, the first part of the model",
    "head": "hidden states to logits, the last part of the model",
    "chain": "the hosted blocks, merged in one process, for short steps",
    "ranges": "an ensemble of the block ranges one after the other, for long steps",
    "pipeline": "an ensemble of embed, the block ranges and head: token ids to logits",
    "sessions": "opens, closes and describes sessions; loads adapters; dials other servers",
    "generate": "text to text, whole or streamed",
    "span": "the hosted blocks, for the steps of other servers",
}


def config_text(model: ModelConfig, plan: RepositoryPlan) -> str:
    """The whole file; the same for equal plans. Parameters come in the order of their names."""
    command = "\n".join(f"#   {line}" for line in init_command(plan, _WIDTH - 10))
    body = "\n".join(_lines(model))
    comments = f"""\
# {model.name}: {_purpose(model.name)}.
# Its tensors are described in docs/protocol.md, its parameters in docs/configuration.md.
#
# Written by this command, run in the folder of the repository:
{command}
#
# To change something, run it with other options; --diff shows what they would change. Do not edit tensors, batch sizes
# and parameters by hand: the models of a server have to agree on them. The command leaves alone what was edited by
# hand, and refuses to change it without --force.
"""
    return stamped(model.name, comments, body + "\n")


def _purpose(name: str) -> str:
    if name.startswith("blocks_"):
        start, end = map(int, name.split("_")[1:])
        return f"the blocks {start} to {end - 1}, in a process of their own" if end - start > 1 else f"block {start}"
    return _PURPOSES[name]


def _lines(message: Message) -> list[str]:
    """A line for each value of each field, several where it is too long for one."""
    lines: list[str] = []
    for descriptor, value in sorted(message.ListFields(), key=lambda field: _rank(field[0].name)):
        name = descriptor.name
        if descriptor.message_type is None:
            lines.append(_with_field(message, name, value))
        elif descriptor.message_type.GetOptions().map_entry:
            lines += [_with_field(message, name, {key: value[key]}) for key in sorted(value)]
        else:
            for part in [value] if isinstance(value, Message) else value:
                line = f"{name} {{ {_one_line(part)} }}".replace("{  }", "{ }")
                lines += [line] if len(line) <= _WIDTH else [f"{name} {{", *(f"  {x}" for x in _lines(part)), "}"]
    return lines


def _rank(name: str) -> int:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST) + (name == _LAST)


def _with_field(like: Message, name: str, value: object) -> str:
    """The line of a field that holds no messages, or one entry of a map."""
    return _one_line(type(like)(**{name: value}))


def _one_line(message: Message) -> str:
    line: str = text_format.MessageToString(message, as_one_line=True, use_short_repeated_primitives=True)
    return line
