"""MLCommons' et_def.proto 0.0.4 (without storage nodes) as protobuf messages, to hold our JSON form against."""

from __future__ import annotations

from types import SimpleNamespace

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "ChakraProtoMsg"
# (name in the oneof of AttributeProto, protobuf type), numbered from 3: each a value and a list of values.
VALUES = (
    "double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32",
    "sfixed64", "bool", "string", "bytes",
)
NODE_TYPES = (
    "INVALID_NODE", "METADATA_NODE", "MEM_LOAD_NODE", "MEM_STORE_NODE", "COMP_NODE", "COMM_SEND_NODE",
    "COMM_RECV_NODE", "COMM_COLL_NODE",
)
Field = descriptor_pb2.FieldDescriptorProto


def chakra_schema() -> SimpleNamespace:
    """`Node` and `GlobalMetadata`, as the generated module et_def_pb2 has them."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package=PACKAGE, syntax="proto3")
    file.enum_type.add(name="NodeType").value.extend(
        descriptor_pb2.EnumValueDescriptorProto(name=name, number=number) for number, name in enumerate(NODE_TYPES)
    )
    attribute = file.message_type.add(name="AttributeProto")
    attribute.oneof_decl.add(name="value")
    _fields(attribute, [("name", 1, "string", False), ("doc_string", 2, "string", False)])
    for place, name in enumerate(VALUES):
        _fields(file.message_type.add(name=f"{name.capitalize()}List"), [("values", 1, name, True)])
        _fields(attribute, [(f"{name}_val", 3 + 2 * place, name, False)], oneof=True)
        _fields(attribute, [(f"{name}_list", 4 + 2 * place, f"{name.capitalize()}List", False)], oneof=True)
    _fields(file.message_type.add(name="GlobalMetadata"), [("version", 1, "string", False),
                                                           ("attr", 2, "AttributeProto", True)])
    _fields(file.message_type.add(name="IOInfo"), [(name, number, "string", False) for number, name in
                                                   enumerate(("values", "shapes", "types"), start=1)])
    _fields(file.message_type.add(name="Node"), [
        ("id", 1, "uint64", False), ("name", 2, "string", False), ("type", 3, "NodeType", False),
        ("ctrl_deps", 4, "uint64", True), ("data_deps", 5, "uint64", True), ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False), ("inputs", 8, "IOInfo", False), ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    ])
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{PACKAGE}.{name}") for name in ("Node", "GlobalMetadata")}
    return SimpleNamespace(**{name: message_factory.GetMessageClass(each) for name, each in found.items()})


def _fields(
    message: descriptor_pb2.DescriptorProto, fields: list[tuple[str, int, str, bool]], oneof: bool = False
) -> None:
    for name, number, type_, repeated in fields:
        label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
        field = message.field.add(name=name, number=number, label=label)
        if type_ in VALUES:
            field.type = Field.Type.Value(f"TYPE_{type_.upper()}")
        else:
            field.type = Field.TYPE_ENUM if type_ == "NodeType" else Field.TYPE_MESSAGE
            field.type_name = f".{PACKAGE}.{type_}"
        if oneof:
            field.oneof_index = 0
