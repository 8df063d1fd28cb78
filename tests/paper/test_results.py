import pytest
from result_files import BENCH, RUN, write

from gsanet.paper.printed import Network, printed_table
from gsanet.paper.results import plain_network, read_results


def row(table, name):
    return next(row for row in printed_table(table).rows if row.name == name)


def test_a_run_stands_for_its_networks_rows(tmp_path):
    results = read_results(write(tmp_path, a=RUN, b={**RUN, "seed": 1, "top5": 75, "memory": 10**9}))
    assert [run.seed for run in results.runs_of(row(6, "ResNet-38, GSA"))] == [0, 1]
    assert not results.runs_of(row(6, "ResNet-38, Convolution"))
    assert results.runs[1].top5 == 75


def test_a_run_may_stand_for_other_rows(tmp_path):
    results = read_results(write(tmp_path, a={**RUN, "rows": ["table4: Content, Col., Row"]}))
    assert results.runs_of(row(4, "Content, Col., Row"))
    assert not results.runs_of(row(6, "ResNet-38, GSA"))


def test_options_that_fit_a_network_to_its_images_do_not_make_another_one():
    assert plain_network("gsa_resnet50", {"img_size": 64, "content": True, "groups": [1, 2, 3, 4]}) == Network(
        "gsa_resnet50"
    )
    assert plain_network("gsa_resnet50", {"groups": [3, 4]}) == row(5, "groups 3, 4").network
    assert plain_network("gsa_resnet50", {"row": False, "content": False}) == row(4, "Col.").network
    assert plain_network("gsa_resnet50", {"width": 0.5}) != Network("gsa_resnet50")


def test_bench_files(tmp_path):
    results = read_results(write(tmp_path, a=RUN, b=BENCH))
    (found,) = results.latencies_of(row(6, "ResNet-38, GSA"))
    assert found.milliseconds == 3.25
    assert found.device == "a machine"
    assert not results.latencies_of(row(6, "ResNet-38, Convolution"))


def test_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_results().runs == []
    with pytest.raises(ValueError, match="no folder of results at"):
        read_results(tmp_path / "elsewhere")


def without(key):
    return {name: value for name, value in RUN.items() if name != key}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (without("seed"), "seed missing"),
        ({**RUN, "top_1": 3}, "unknown keys top_1"),
        ({**RUN, "top1": 149}, "top1 must be a percentage, got 149"),
        ({**RUN, "top1": "49"}, "top1 must be int or float, got '49'"),
        ({**RUN, "seed": True}, "seed must be int, got True"),
        ({**RUN, "command": ""}, "command must not be empty"),
        ({**RUN, "rows": ["table4: all"]}, "no row of the paper's tables is called 'table4: all'"),
        ({**RUN, "kind": "guess"}, "kind must be 'run' or 'bench', got 'guess'"),
        ({"kind": "bench", "setting": {}}, "'environment' is missing"),
        ([RUN], "must hold one JSON object"),
        ("{", "Expecting property name"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, content, words):
    with pytest.raises(ValueError, match=rf"wrong\.json: .*{words}"):
        read_results(write(tmp_path, right=RUN, wrong=content))
