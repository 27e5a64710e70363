"""TorchTitan's configurations as text: TOML, JSON and Python, the position of each value, and errors."""

from __future__ import annotations

import pytest

from shardwright import InputError
from shardwright.interop.torchtitan.importing import TorchTitanRequest, import_torchtitan
from shardwright.interop.torchtitan.reading import parse_section

TOML = "[parallelism]\ndata_parallel_shard_degree = 2\ntensor_parallel_degree = 4\nexpert_parallel_degree = 2\n"
EARLIER = "[training]\ntensor_parallel_degree = 4\nseq_len = 2048\n[experimental]\ncontext_parallel_degree = 2\n"
JSON = '{"parallelism": {"tensor_parallel_degree": 4,\n "enable_sequence_parallel": false}}'
PYTHON = """\
from torchtitan import config as configs

def small():
    return Config(parallelism=ParallelismConfig(tensor_parallel_degree=2, data_parallel_shard_degree=-1))

def large():
    config = small()
    config.parallelism.context_parallel_degree = 2
    return Config(parallelism=configs.ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4 * 2))
"""


@pytest.mark.parametrize(
    ("text", "source", "config", "values", "places"),
    [
        (
            TOML,
            "a.toml",
            None,
            {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 4},
            {"tensor_parallel_degree": "3:1"},
        ),
        (
            EARLIER,
            "a.toml",
            None,
            {"tensor_parallel_degree": 4, "context_parallel_degree": 2},
            {"context_parallel_degree": "5:1"},
        ),
        (
            JSON,
            "a.json",
            None,
            {"tensor_parallel_degree": 4, "enable_sequence_parallel": False},
            {"enable_sequence_parallel": "2:2"},
        ),
        (
            PYTHON,
            "a.py",
            "small",
            {"tensor_parallel_degree": 2, "data_parallel_shard_degree": -1},
            {"tensor_parallel_degree": "4:49"},
        ),
        (
            PYTHON,
            "a.py",
            "large",
            {"pipeline_parallel_degree": 2, "num_pp_microbatches": 8},
            {"num_pp_microbatches": "9:85"},
        ),
    ],
)
def test_reading(text, source, config, values, places):
    section = parse_section(text, source, config)
    for name, value in values.items():
        assert section.values[name] == value
    for name, place in places.items():
        assert str(section.positions[name]) == f"{source}:{place}"


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("[parallelism\n", "a.toml", "a.toml:1:13: not TOML: expected ']' at the end of a table declaration."),
        ("{", "a.json", "a.json:1:2: not JSON: expecting property name enclosed in double quotes."),
        ("def f(:\n", "a.py", "a.py:1:7: not Python: invalid syntax."),
        ("x = 1\n", "a.py", "a.py: nothing here builds a ParallelismConfig."),
        (PYTHON, "a.py", "a.py: 2 configurations. Choose one with --config NAME. Known: small, large."),
        (
            "[model]\nname = 'x'\n",
            "a.toml",
            "a.toml: no section 'parallelism', and no degree of TorchTitan's in any other.",
        ),
        ("parallelism = 3\n", "a.toml", "a.toml: 'parallelism' is a section of options; found 3."),
        ("[]", "a.json", "a.json: a configuration has sections; this is a list."),
        (
            "[parallelism]\ntensor_parallel_degree = 'four'\n",
            "a.toml",
            "a.toml:2:1: 'tensor_parallel_degree' is a whole number; found 'four'.",
        ),
        (
            "[parallelism]\nenable_sequence_parallel = 1\n",
            "a.toml",
            "a.toml:2:1: 'enable_sequence_parallel' is true or false; found 1.",
        ),
        (
            "c = ParallelismConfig(tensor_parallel_degree=n)\n",
            "a.py",
            "a.py:1:46: 'tensor_parallel_degree' is computed by the program, which is parsed and not run: 'n' is not in the file. "
            "Write a number.",
        ),
        ("x = " + "lambda:(" * 201, "a.py", "a.py: not readable: its expressions are nested too deeply."),
        ("[" * 1000, "a.py", "a.py:1:201: not Python: too many nested parentheses."),
        ("x = " + "a[" * 150 + "0" + "]" * 150 + "\n", "a.py", "a.py: nothing here builds a ParallelismConfig."),
        ("x = " + "-" * 900 + "1\n", "a.py", "a.py: not readable: its expressions are nested too deeply."),
        ("x = " + "[" * 2000, "a.toml", "a.toml: not readable: the values are nested too deeply."),
        (
            '{"parallelism": {"tensor_parallel_degree": null}}',
            "a.json",
            "a.json:1:18: 'tensor_parallel_degree' is a whole number; found nothing.",
        ),
        (
            '{"parallelism": {}, "training": {"seq_len": null}}',
            "a.json",
            "a.json:1:34: 'seq_len' is a whole number; found nothing.",
        ),
        (
            "[parallelism]\n[training]\nlocal_batch_size = 0\n",
            "a.toml",
            "a.toml:3:1: 'local_batch_size' is at least 1; found 0.",
        ),
        (
            "[parallelism]\n[training]\nmixed_precision_param = 'float16'\n",
            "a.toml",
            "a.toml:3:1: 'training.mixed_precision_param' is one of float32, bfloat16; found 'float16'.",
        ),
        (
            f"[parallelism]\ntensor_parallel_degree = {'9' * 5000}\n",
            "a.toml",
            "a.toml:2:26: a number of 5,000 digits, where 1,000 are the most. Write a smaller number.",
        ),
        (
            f"[parallelism]\n{'.'.join(['a'] * 20_000)} = 1\n",
            "a.toml",
            "a.toml:2:1: a key of 20,000 parts, where 100 are the most. Nest fewer tables.",
        ),
    ],
)
def test_what_cannot_be_read(text, source, message):
    with pytest.raises(InputError) as refused:
        parse_section(text, source)
    assert str(refused.value).split("\n")[0] == message


@pytest.mark.parametrize(
    ("option", "more", "kept"),
    [("never", "", True), ("always", "", False), ("never", "pipeline_parallel_degree = 2", False)],
)
def test_weights_stay_gathered_where_they_are_never_resharded(tmp_path, option, more, kept):
    degrees = f"data_parallel_shard_degree = 4\ncontext_parallel_degree = 2\n{more}\n"
    (tmp_path / "a.toml").write_text(f"[parallelism]\n{degrees}fsdp_reshard_after_forward = '{option}'\n")
    layout = import_torchtitan(TorchTitanRequest(file=str(tmp_path / "a.toml"))).layout
    assert [axis for axis, entry in layout.entries.items() if entry.keep_gathered] == ["dp_shard", "cp"] * kept


LISTED = """\
[parallelism]
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
[model]
name = "llama3"
flavor = "8B"
converters = ["float8"]
[mx]
recipe_name = "mxfp8"
[compile]
enable = true
"""
PYTHON_LISTED = """\
def mine():
    return Trainer.Config(
        model_spec=model_registry("8B", converters=[MXFP8LinearConverter.Config(recipe="mxfp8_rceil")]),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        compile=CompileConfig(enable=True, enable_async_tensor_parallel=True),
        optimizer=OptimizersContainer.Config(lr=3e-4),
    )
"""


@pytest.mark.parametrize(
    ("text", "source", "listed"),
    [
        (
            LISTED,
            "a.toml",
            ("parallelism.enable_async_tensor_parallel", "model.converters float8", "mx.recipe_name", "compile.enable"),
        ),
        (
            "from torchtitan.models.llama3 import model_registry\n" + PYTHON_LISTED,
            "a.py",
            (
                "model_spec.converters MXFP8LinearConverter",
                "compile.enable",
                "compile.enable_async_tensor_parallel",
                "optimizer.lr",
            ),
        ),
    ],
)
def test_what_a_file_sets_and_nothing_follows_from_is_listed(text, source, listed):
    assert parse_section(text, source).not_read(planned=True) == listed
