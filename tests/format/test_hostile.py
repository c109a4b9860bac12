"""Every fact that a reader checks, broken once: a typed error that names the file and the field."""

import pytest

from blockstore.errors import CacheMiss, CorruptEntry, UnsupportedFormat
from blockstore.header import MAX_JSON_BYTES, decode_header, header_bytes
from format.headers import attached, changed, entry, header, in_file, in_rows, monolith, nested, pack, rows, segments
from format.hostile import CHEAP, Row

SOUND = {"rows": rows(), "segments": segments(), "monolith": monolith(), "attached": attached(), "lists": nested(8)}


@pytest.mark.parametrize("row", CHEAP, ids=[f"{number} {row.fact}" for number, row in enumerate(CHEAP)])
def test_a_hostile_header_is_refused(row: Row) -> None:
    with pytest.raises(CacheMiss) as caught:
        decode_header(row.data, path="some/file.mlxkv", file_size=row.file_size)
    assert type(caught.value) is row.error
    assert caught.value.path == "some/file.mlxkv"
    assert caught.value.field == row.field
    assert {"expected", "found"} <= caught.value.facts.keys()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", SOUND)
def test_what_the_table_breaks_is_sound(name: str) -> None:
    """Were it not, the table's rows could be refused for other reasons than their own."""
    size = 65536 if SOUND[name]["formatVersion"] < 5 else None
    assert decode_header(pack(SOUND[name]), path=name, file_size=size).model_id == "m"


@pytest.mark.parametrize("name", SOUND)
def test_unknown_fields_and_other_orders_are_accepted(name: str) -> None:
    def decorate(value: object) -> object:
        if isinstance(value, list):
            return [decorate(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {"unknown": [{}], **dict(reversed([(key, decorate(item)) for key, item in value.items()]))}

    plain = decode_header(pack(SOUND[name]), path=name)
    value = decorate(SOUND[name])
    assert isinstance(value, dict)
    found = decode_header(pack(value), path=name)
    assert (found.tokens, found.segments, found.ns) == (plain.tokens, plain.segments, plain.ns)
    assert [slot for entry in found.caches for slot in entry.tensors] == [
        slot for entry in plain.caches for slot in entry.tensors
    ]


def test_spaces_and_repeated_keys_are_accepted() -> None:
    text = (
        pack(rows())[26:].replace(b",", b" ,\n\t").replace(b'{"formatVersion"', b'{"formatVersion":9,"formatVersion"')
    )
    assert decode_header(pack(text), path="p") == decode_header(pack(rows()), path="p")


def test_absent_and_null_identity_are_one() -> None:
    value = changed(rows(), ns=None, codecProvider=None, modelId=None)
    found = decode_header(pack(value), path="p")
    assert (found.ns, found.codec_provider, found.model_id, found.config_fingerprint) == (None, None, None, "c")


def test_an_empty_tensor_may_lie_past_the_end() -> None:
    value = header(4, 5, monolith()["caches"], attachments=[])
    value["attachments"] = [{"schema": "s", "metadata": None, "tensors": [in_file(99999, 0, 3)]}]
    assert decode_header(pack(value), path="p", file_size=32768 + 40).attachments[0].tensors[0].bytes == 0


def test_mtp_mla_may_trail_by_one_token() -> None:
    geometry = {"kvLoraRank": 4, "ropeHeadDim": 2, "maxTokens": 8}
    value = header(5, 5, [entry("mtp-mla", 4, [in_rows(1, 4, 4), in_rows(1, 4, 2)], **geometry)])
    assert decode_header(pack(value), path="p").caches[0].offset == 4


def test_blocks_and_axes_mean_nothing_before_v5() -> None:
    value = changed(monolith(), **{"caches[0].tensors[0].blocks": [], "caches[0].tensors[1].axis": 9, "segments": []})
    assert decode_header(pack(value), path="p") == decode_header(pack(monolith()), path="p")


def test_integers_beyond_53_bits_are_floats_as_in_javascript() -> None:
    metadata = {"big": 10**20, "edge": 2**53 - 1}
    value = changed(rows(), **{"attachments[0].metadata": metadata})
    found = decode_header(pack(value), path="p").attachments[0].metadata
    assert (found, type(found["big"]), type(found["edge"])) == (metadata, float, int)
    beyond = changed(rows(), **{"attachments[0].metadata": [10**400]})
    with pytest.raises(CorruptEntry, match=r"attachments\[0\].metadata"):
        decode_header(pack(beyond), path="p")


def test_only_as_much_is_read_as_the_header_takes() -> None:
    sound = pack(rows())
    assert header_bytes(sound[:26], path="p", file_size=len(sound)) == len(sound)
    with pytest.raises(UnsupportedFormat):
        header_bytes(pack(rows(), size=MAX_JSON_BYTES + 1)[:26], path="p", file_size=1 << 40)
