"""Looks into an ONNX file before a runtime is given it, so that a policy can be nothing but arithmetic.

Only the few message fields that matter are read, straight from protocol buffers' wire format, because the machine
that runs a policy has no ONNX library beside the runtime. Field numbers are those of `onnx.proto` of the ONNX project,
the encoding is that of https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

OPERATORS = frozenset(
    {"Add", "Cast", "Clip", "Concat", "Constant", "Div", "Flatten", "Gather", "Gemm", "MatMul", "Max", "Min", "Mul"}
    | {"Identity", "Relu", "Sigmoid", "Split", "Sub", "Tanh", "Unsqueeze"}
    # Of policies over sets of sites.
    | {
        "And",
        "Exp",
        "Greater",
        "GreaterOrEqual",
        "LayerNormalization",
        "Less",
        "LessOrEqual",
        "Log",
        "Pow",
        "ReduceMax",
    }
    | {"ReduceMean", "ReduceMin", "ReduceSum", "Reshape", "Shape", "Slice", "Softmax", "Squeeze", "Transpose", "Where"}
)
"""Operators a policy is made of: arithmetic and layout, without loops or branches."""

_MODEL_GRAPH, _MODEL_OPSET, _MODEL_TRAINING, _MODEL_FUNCTIONS = 7, 8, 20, 25
_OPSET_DOMAIN = 1
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_SPARSE = 1, 5, 15
_NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 4, 5, 7
_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS, _ATTRIBUTE_GRAPHS = 5, 10, (6, 11)
_TENSOR_EXTERNAL, _TENSOR_LOCATION = 13, 14

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_OWN_DOMAINS = ("", "ai.onnx")


def check_graph(model: bytes) -> None:
    """Refuses models that refer to other files or hold more than plain operators.

    Args:
        model: Content of an ONNX file.

    Raises:
        ValueError: Says what is not allowed, or that the file is damaged.
    """
    for number, value in _fields(memoryview(model)):
        if number in (_MODEL_FUNCTIONS, _MODEL_TRAINING):
            raise ValueError("it defines functions of its own")
        if number == _MODEL_OPSET:
            for inner, domain in _fields(_message(value)):
                if inner == _OPSET_DOMAIN:
                    _check_domain(_text(domain))
        elif number == _MODEL_GRAPH:
            _check_nodes(_message(value))


def _check_nodes(graph: memoryview) -> None:
    for number, value in _fields(graph):
        if number == _GRAPH_SPARSE:
            raise ValueError("it holds sparse tensors")
        if number == _GRAPH_INITIALIZER:
            _check_tensor(_message(value))
        elif number == _GRAPH_NODE:
            for inner, part in _fields(_message(value)):
                if inner == _NODE_DOMAIN:
                    _check_domain(_text(part))
                elif inner == _NODE_OPERATOR and _text(part) not in OPERATORS:
                    raise ValueError(f"it uses the operator '{_text(part)}'; allowed: {', '.join(sorted(OPERATORS))}")
                elif inner == _NODE_ATTRIBUTE:
                    _check_attribute(_message(part))


def _check_attribute(attribute: memoryview) -> None:
    for number, value in _fields(attribute):
        if number in _ATTRIBUTE_GRAPHS:
            raise ValueError("it holds a graph within the graph")
        if number in (_ATTRIBUTE_TENSOR, _ATTRIBUTE_TENSORS):
            _check_tensor(_message(value))


def _check_tensor(tensor: memoryview) -> None:
    for number, value in _fields(tensor):
        if number == _TENSOR_EXTERNAL or (number == _TENSOR_LOCATION and value != 0):
            raise ValueError("it keeps weights in another file")


def _check_domain(domain: str) -> None:
    if domain not in _OWN_DOMAINS:
        raise ValueError(f"it uses operators of the domain '{domain}'")


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field numbers and values of one message; fixed-width numbers, which nothing here needs, come as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError("it is no ONNX file, or damaged")
        if position + length > len(data):
            raise ValueError("it is cut short")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ValueError("it is cut short")
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
    raise ValueError("it is no ONNX file, or damaged")


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no ONNX file, or damaged")
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_message(value)).decode("utf-8", "replace")
