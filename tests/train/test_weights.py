import pytest
import torch
from safetensors.torch import load_file, save_file

import gsanet
from gsanet.train.engine import make_model, train
from gsanet.train.weights import load_exactly, load_weights, read_weights

OPTIONS = {"depths": (1, 1), "width": 0.125, "stem": "3x3/1"}


def network(num_classes=10, img_size=8, **options):
    return gsanet.create_model("gsa_resnet26", num_classes=num_classes, img_size=img_size, **{**OPTIONS, **options})


@pytest.fixture
def stored(tmp_path):
    source = network()
    save_file(source.state_dict(), tmp_path / "weights.safetensors")
    return source.state_dict(), tmp_path / "weights.safetensors"


def test_the_same_network(stored):
    weights, file = stored
    model = network()
    assert load_weights(model, file) == f"Weights of {file}: {len(weights)} of {len(weights)} tensors as they are."
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_other_classes_get_a_new_head_and_another_size_other_tables(stored):
    weights, file = stored
    model = network(num_classes=7, img_size=12)
    head = model.head.fc.weight.detach().clone()
    said = load_weights(model, file)
    assert "4 tables of relative positions resized" in said
    assert "a new head for 7 classes in the place of 10" in said
    loaded = model.state_dict()
    assert torch.equal(loaded["head.fc.weight"], head)
    assert torch.equal(loaded["stem.conv.weight"], weights["stem.conv.weight"])
    table = "stages.0.0.self_attn.rel_column"
    assert (len(weights[table]), len(loaded[table])) == (15, 23)
    # The end of a stretched table is the end of the old one, scaled for the longer sum.
    torch.testing.assert_close(loaded[table][0], weights[table][0] * 16 / 24)


def test_weights_of_another_network_are_refused_and_nothing_is_loaded(stored):
    _, file = stored
    model = network(depths=(2, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"do not fit the model: stages\.0\.1\..* is missing there"):
        load_weights(model, file)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"stem\.conv\.weight is 8x3x3x3 there and is 16x3x3x3 in the model"):
        load_weights(network(width=0.25), file)
    with pytest.raises(ValueError, match=r"is .* there and is not in the model"):
        load_weights(network(content=True, row=False), file)


def test_files_that_are_no_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights at nowhere"):
        read_weights("nowhere")
    with pytest.raises(FileNotFoundError, match="no weights at"):
        read_weights(tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "model.pth")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_weights(tmp_path / "model.pth")


def test_fine_tuning_from_a_run(tiny_recipe, tmp_path, image_folder, capsys):
    """From ten classes at 8x8 to two at 16x16."""
    train(tiny_recipe(steps=2), tmp_path / "digits")
    folder = {"data.path": str(image_folder), "data.workers": 0, "batch_size": 4}
    recipe = tiny_recipe(steps=1, weights=str(tmp_path / "digits"), img_size=16, lr=1e-9, **folder)
    train(recipe, tmp_path / "tuned")
    assert "a new head for 2 classes in the place of 10" in capsys.readouterr().out
    before, after = (load_file(tmp_path / run / "last" / "model.safetensors") for run in ("digits", "tuned"))
    torch.testing.assert_close(before["stem.conv.weight"], after["stem.conv.weight"])
    assert after["head.fc.weight"].shape == (2, before["head.fc.weight"].shape[1])


def test_damaged_weights_are_not_silently_replaced_by_older_ones(tiny_recipe, tmp_path):
    train(tiny_recipe(epochs=2), tmp_path / "run")
    (tmp_path / "run" / "best" / "model.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match=r"model\.safetensors is damaged.*the one before it is whole: .*best\.previous"):
        read_weights(tmp_path / "run")


def test_best_weights_come_before_last(tiny_recipe, tmp_path):
    train(tiny_recipe(steps=2, ema=0.5), tmp_path / "run")
    average = load_file(tmp_path / "run" / "last" / "ema.safetensors")
    for source in (tmp_path / "run", tmp_path / "run" / "best", tmp_path / "run" / "last"):
        found = read_weights(source)
        assert torch.equal(found["head.fc.weight"], average["head.fc.weight"])
    assert make_model(tiny_recipe(), 10).load_state_dict(found)


def test_a_resumed_run_does_not_need_the_weights_it_began_with(tiny_recipe, tmp_path):
    train(tiny_recipe(steps=2), tmp_path / "first")
    file = tmp_path / "start.safetensors"
    (tmp_path / "first" / "best" / "model.safetensors").rename(file)
    recipe = tiny_recipe(steps=2, weights=str(file))
    train(recipe, tmp_path / "second")
    file.unlink()
    assert train(recipe, tmp_path / "second", resume=True).progress.step == 2


def test_weights_for_other_classes_are_told_apart_from_another_network(stored):
    _, file = stored
    with pytest.raises(ValueError, match=r"tell \d+ classes apart, not 3: are these the right images\?"):
        load_exactly(network(num_classes=3), file)
