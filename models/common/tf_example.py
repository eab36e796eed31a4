"""The record format of TensorFlow's datasets, ``tf.train.Example`` messages, without TensorFlow.

``_describe`` declares the message with the field numbers of the original::

    Example { Features features = 1; }            Features { map<string, Feature> feature = 1; }
    Feature { oneof { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3; } }
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from numpy.typing import NDArray

from models.common.errors import DataError

_PACKAGE = "jaxhetero_models"
_Field = descriptor_pb2.FieldDescriptorProto


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}/example.proto", package=_PACKAGE, syntax="proto3")

    def add(owner: Any, name: str, number: int, kind: int, *, of: str = "", repeated: bool = False) -> Any:
        label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
        type_name = f".{_PACKAGE}.{of}" if of else None
        return owner.field.add(name=name, number=number, type=kind, label=label, type_name=type_name)

    lists = {"bytes_list": _Field.TYPE_BYTES, "float_list": _Field.TYPE_FLOAT, "int64_list": _Field.TYPE_INT64}
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, kind) in enumerate(lists.items(), start=1):
        add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
        add(feature, name, number, _Field.TYPE_MESSAGE, of=name).oneof_index = 0
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, _Field.TYPE_STRING)
    add(entry, "value", 2, _Field.TYPE_MESSAGE, of="Feature")
    add(features, "feature", 1, _Field.TYPE_MESSAGE, of="Features.FeatureEntry", repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, _Field.TYPE_MESSAGE, of="Features")
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_describe())
_Example: Any = message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))

Value = NDArray[Any] | Sequence[bytes]


def encode_example(features: Mapping[str, Value]) -> bytes:
    """Encode features as a record. Equal features give equal bytes.

    Integer arrays become int64 lists, float arrays become float lists, and sequences of bytes become bytes lists.
    """
    example = _Example()
    for name, value in features.items():
        feature = example.features.feature[name]
        if not isinstance(value, np.ndarray):
            feature.bytes_list.value.extend(value)
        elif np.issubdtype(value.dtype, np.integer):
            feature.int64_list.value.extend(value.tolist())
        else:
            feature.float_list.value.extend(value.tolist())
    encoded: bytes = example.SerializeToString(deterministic=True)
    return encoded


def decode_example(record: bytes, names: Sequence[str], *, where: str) -> dict[str, Any]:
    """The features ``names`` of a record: int64 or float32 arrays, or lists of bytes.

    Raises:
      DataError: the record is not a tf.train.Example, or a feature is missing or empty. The message calls the record
        ``where``.
    """
    try:
        features = _Example.FromString(record).features.feature
    except message.DecodeError:
        raise DataError(f"{where} is damaged, or is not a tf.train.Example") from None
    found: dict[str, Any] = {}
    for name in names:
        if name not in features:
            raise DataError(f"{where} has no feature {name!r}; it has {', '.join(sorted(features)) or 'none'}")
        kind = features[name].WhichOneof("kind")
        if kind is None:
            raise DataError(f"{where}: the feature {name!r} is empty")
        values = getattr(features[name], kind).value
        dtype = {"int64_list": np.int64, "float_list": np.float32}.get(kind)
        found[name] = list(values) if dtype is None else np.array(values, dtype)
    return found
