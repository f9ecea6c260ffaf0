"""The configuration of every model of a server, as Triton's own protobuf."""

import json
from collections.abc import Iterable

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import (
    TYPE_BOOL,
    TYPE_FP32,
    TYPE_INT32,
    TYPE_INT64,
    TYPE_STRING,
    TYPE_UINT8,
    TYPE_UINT64,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelParameter,
)

from corolla.model.batch_sizes import COMPILED, joined, preferred_batch_sizes
from corolla.repository.plan import RepositoryPlan

QUEUE_DELAY_MICROSECONDS = 500
"""How long a batch may wait for more rows, up to the next decoder batch size."""


def all_models(plan: RepositoryPlan) -> list[ModelConfig]:
    """Every model of the server, in the order of a request's way."""
    models = [_blocks(plan, blocks_name(blocks), blocks) for blocks in plan.ranges]
    if plan.hosted:
        models += [_ranges(plan), _blocks(plan, "chain", plan.hosted)]
        models += [_span(plan)] if plan.span or plan.registry else []
    models.append(_sessions(plan))
    if plan.ends:
        models = [_embed(plan), *models, _head(plan), _generate(plan)]
        models += [_pipeline(plan)] if plan.whole else []
    return models


def blocks_name(blocks: range) -> str:
    """The model that hosts a block range."""
    return f"blocks_{blocks.start:02d}_{blocks.stop:02d}"


def _embed(plan: RepositoryPlan) -> ModelConfig:
    model = _backend_model(plan, "embed", "corolla_embed", plan.max_batch_size)
    model.input.append(ModelInput(name="input_ids", data_type=TYPE_INT64, dims=[-1]))
    model.output.append(_hidden_output(plan, "hidden_states"))
    model.dynamic_batching.SetInParent()
    return model


def _head(plan: RepositoryPlan) -> ModelConfig:
    model = _backend_model(plan, "head", "corolla_head", plan.max_batch_size)
    model.input.append(_hidden_input(plan))
    model.output.append(_logits(plan))
    model.dynamic_batching.SetInParent()
    return model


def _blocks(plan: RepositoryPlan, name: str, blocks: range) -> ModelConfig:
    model = _backend_model(plan, name, "corolla_blocks", plan.max_batch_size)
    model.parameters["blocks"].CopyFrom(_parameter(f"{blocks.start}:{blocks.stop}"))
    model.input.extend([_hidden_input(plan), *_session_inputs()])
    model.output.append(_hidden_output(plan, "output_hidden_states"))
    model.dynamic_batching.SetInParent()
    if plan.decoder == COMPILED and plan.mirror:
        model.dynamic_batching.preferred_batch_size.extend(preferred_batch_sizes(plan.batch_sizes))
        model.dynamic_batching.max_queue_delay_microseconds = QUEUE_DELAY_MICROSECONDS
    return model


def _ranges(plan: RepositoryPlan) -> ModelConfig:
    model = ModelConfig(name="ranges", platform="ensemble", max_batch_size=plan.max_batch_size)
    model.input.extend([_hidden_input(plan), *_session_inputs()])
    model.output.append(_hidden_output(plan, "output_hidden_states"))
    steps = _range_steps(plan, "hidden_states", "output_hidden_states", with_session=True)
    model.ensemble_scheduling.step.extend(steps)
    return model


def _pipeline(plan: RepositoryPlan) -> ModelConfig:
    model = ModelConfig(name="pipeline", platform="ensemble", max_batch_size=plan.max_batch_size)
    model.input.append(ModelInput(name="input_ids", data_type=TYPE_INT64, dims=[-1]))
    model.input.append(_optional("adapter", TYPE_STRING))
    model.output.append(_logits(plan))
    model.ensemble_scheduling.step.extend(
        [
            _step("embed", {"input_ids": "input_ids"}, {"hidden_states": "embedded"}),
            *_range_steps(plan, "embedded", "last_hidden_states", with_session=False),
            _step("head", {"hidden_states": "last_hidden_states"}, {"logits": "logits"}),
        ]
    )
    return model


def _span(plan: RepositoryPlan) -> ModelConfig:
    model = _backend_model(plan, "span", "corolla_span", max_batch_size=0)
    model.parameters["blocks"].CopyFrom(_parameter(f"{plan.hosted.start}:{plan.hosted.stop}"))
    model.model_transaction_policy.decoupled = True
    model.input.extend(
        [
            ModelInput(name="session_id", data_type=TYPE_STRING, dims=[-1]),
            ModelInput(name="start_position", data_type=TYPE_INT32, dims=[-1]),
            ModelInput(name="step_id", data_type=TYPE_STRING, dims=[1]),
            _optional("hidden_states", TYPE_UINT8, -1),
            _optional("encoding", TYPE_STRING),
            _optional("shape", TYPE_INT32, 3),
            _optional("blocks", TYPE_INT32, 2),
            _optional("next", TYPE_STRING),
            _optional("timeout", TYPE_FP32),
        ]
    )
    model.output.extend(
        [
            ModelOutput(name="hidden_states", data_type=TYPE_UINT8, dims=[-1]),
            ModelOutput(name="encoding", data_type=TYPE_STRING, dims=[1]),
            ModelOutput(name="shape", data_type=TYPE_INT32, dims=[3]),
            ModelOutput(name="pushed", data_type=TYPE_BOOL, dims=[1]),
            ModelOutput(name="free_tokens", data_type=TYPE_INT64, dims=[1]),
            ModelOutput(name="seconds", data_type=TYPE_FP32, dims=[1]),
            ModelOutput(name="duplicate", data_type=TYPE_BOOL, dims=[1]),
        ]
    )
    return model


def _sessions(plan: RepositoryPlan) -> ModelConfig:
    model = _backend_model(plan, "sessions", "corolla_sessions", max_batch_size=0)
    model.instance_group[0].CopyFrom(_CPU_INSTANCE)
    model.input.extend(
        [
            ModelInput(name="operation", data_type=TYPE_STRING, dims=[1]),
            _optional("session_id", TYPE_STRING),
            _optional("max_length", TYPE_INT32),
            _optional("timeout", TYPE_FP32),
            _optional("priority", TYPE_INT32),
            _optional("idle_timeout", TYPE_FP32),
            _optional("adapter", TYPE_STRING),
            _optional("source", TYPE_STRING),
            _optional("address", TYPE_STRING),
        ]
    )
    counters = ("max_length", "length", "reserved_tokens", "free_tokens", "total_tokens", "open_sessions", "waiting")
    texts = ("session_id", "adapter", "adapters", "dialled")
    model.output.extend(ModelOutput(name=name, data_type=TYPE_STRING, dims=[1]) for name in texts)
    model.output.extend(ModelOutput(name=name, data_type=TYPE_INT64, dims=[1]) for name in counters)
    return model


def _generate(plan: RepositoryPlan) -> ModelConfig:
    model = _backend_model(plan, "generate", "corolla_generate", max_batch_size=1)
    if plan.hosted:
        model.parameters["blocks"].CopyFrom(_parameter(f"{plan.hosted.start}:{plan.hosted.stop}"))
    if plan.registry:
        model.parameters["wire"].CopyFrom(_parameter(plan.wire or plan.dtype.name))
        model.parameters["step_timeout"].CopyFrom(_parameter(f"{plan.step_timeout:g}"))
        model.parameters["failover_timeout"].CopyFrom(_parameter(f"{plan.failover_timeout:g}"))
    model.model_transaction_policy.decoupled = True
    model.input.append(ModelInput(name="text_input", data_type=TYPE_STRING, dims=[1]))
    model.input.extend(_optional(name, data_type, dims) for name, data_type, dims in _GENERATE_OPTIONS)
    model.output.extend(
        [
            ModelOutput(name="text_output", data_type=TYPE_STRING, dims=[1]),
            ModelOutput(name="session_id", data_type=TYPE_STRING, dims=[1]),
            ModelOutput(name="finish_reason", data_type=TYPE_STRING, dims=[1]),
            ModelOutput(name="num_input_tokens", data_type=TYPE_INT32, dims=[1]),
            ModelOutput(name="num_output_tokens", data_type=TYPE_INT32, dims=[1]),
        ]
    )
    return model


_GENERATE_OPTIONS = (
    ("session_id", TYPE_STRING, 1),
    ("adapter", TYPE_STRING, 1),
    ("sampling_parameters", TYPE_STRING, 1),
    ("stream", TYPE_BOOL, 1),
    ("exclude_input_in_output", TYPE_BOOL, 1),
    ("max_tokens", TYPE_INT32, 1),
    ("min_length", TYPE_INT32, 1),
    ("temperature", TYPE_FP32, 1),
    ("top_k", TYPE_INT32, 1),
    ("top_p", TYPE_FP32, 1),
    ("min_p", TYPE_FP32, 1),
    ("repetition_penalty", TYPE_FP32, 1),
    ("presence_penalty", TYPE_FP32, 1),
    ("frequency_penalty", TYPE_FP32, 1),
    ("length_penalty", TYPE_FP32, 1),
    ("beam_width", TYPE_INT32, 1),
    ("random_seed", TYPE_UINT64, 1),
    ("seed", TYPE_UINT64, 1),
    ("priority", TYPE_INT32, 1),
    ("timeout", TYPE_FP32, 1),
    ("stop_words", TYPE_STRING, -1),
    ("bad_words", TYPE_STRING, -1),
    ("return_num_input_tokens", TYPE_BOOL, 1),
    ("return_num_output_tokens", TYPE_BOOL, 1),
)


_CPU_INSTANCE = ModelInstanceGroup(count=1, kind=ModelInstanceGroup.KIND_CPU)


def _backend_model(plan: RepositoryPlan, name: str, backend: str, max_batch_size: int) -> ModelConfig:
    model = ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    model.instance_group.append(_instance(plan))
    settings = {
        "checkpoint": str(plan.checkpoint),
        "dtype": plan.dtype.name,
        "quant": plan.quant,
        "threads": str(plan.threads),
        "attn_cache_tokens": str(plan.cache_tokens),
        "page_size": str(plan.page_size),
        "max_short_tokens": str(plan.short_tokens),
        "max_batch_size": str(plan.max_batch_size),
        "decoder": plan.decoder,
        "decoder_batch_sizes": joined(plan.batch_sizes),
        "batch_channel_capacity": str(plan.batch_channel_capacity),
        "tensor_parallel": str(plan.tensor_parallel),
        "mirror": str(plan.mirror).lower(),
        "registry": plan.registry,
        "model_id": plan.model_id,
        "revision": plan.revision,
        "adapters": json.dumps({name: str(source) for name, source in plan.adapters.items()}, sort_keys=True),
    }
    for key, value in settings.items():
        model.parameters[key].CopyFrom(_parameter(value))
    return model


def _instance(plan: RepositoryPlan) -> ModelInstanceGroup:
    if plan.device == "cuda":
        return ModelInstanceGroup(count=1, kind=ModelInstanceGroup.KIND_GPU, gpus=[0])
    return _CPU_INSTANCE


def _range_steps(plan: RepositoryPlan, first: str, last: str, *, with_session: bool) -> Iterable[ModelEnsembling.Step]:
    session = ("session_id", "start_position", "hypo_ids") if with_session else ()
    optional = {name: name for name in (*session, "adapter")}
    names = [first, *(f"hidden_states_{blocks.stop:02d}" for blocks in plan.ranges[:-1]), last]
    for blocks, source, target in zip(plan.ranges, names[:-1], names[1:], strict=True):
        yield _step(blocks_name(blocks), {"hidden_states": source, **optional}, {"output_hidden_states": target})


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> ModelEnsembling.Step:
    return ModelEnsembling.Step(model_name=model, model_version=-1, input_map=inputs, output_map=outputs)


def _session_inputs() -> list[ModelInput]:
    return [
        _optional("session_id", TYPE_STRING),
        _optional("start_position", TYPE_INT32),
        _optional("hypo_ids", TYPE_INT32),
        _optional("adapter", TYPE_STRING),
    ]


def _optional(name: str, data_type: int, dims: int = 1) -> ModelInput:
    return ModelInput(name=name, data_type=data_type, dims=[dims], optional=True)


def _hidden_input(plan: RepositoryPlan) -> ModelInput:
    return ModelInput(name="hidden_states", data_type=_hidden_type(plan), dims=[-1, plan.config.hidden_size])


def _hidden_output(plan: RepositoryPlan, name: str) -> ModelOutput:
    return ModelOutput(name=name, data_type=_hidden_type(plan), dims=[-1, plan.config.hidden_size])


def _hidden_type(plan: RepositoryPlan) -> int:
    value: int = model_config_pb2.DataType.Value(plan.dtype.config_name)
    return value


def _logits(plan: RepositoryPlan) -> ModelOutput:
    return ModelOutput(name="logits", data_type=TYPE_FP32, dims=[-1, plan.config.vocab_size])


def _parameter(value: str) -> ModelParameter:
    return ModelParameter(string_value=value)
