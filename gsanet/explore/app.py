"""The page in Gradio: what is on it, and what answers which click."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import gradio as gr

from gsanet.explore import page
from gsanet.explore.handlers import LOOK, PICTURE, Handlers
from gsanet.explore.study import Explorer

CSS = files("gsanet.explore").joinpath("page.css").read_text()
# What was clicked: a pixel of the picture; or a tile, which says what it stands for.
PICK_PIXEL = """
element.addEventListener('click', event => {
  const picture = event.target.closest('.photograph');
  if (!picture) return;
  const box = picture.getBoundingClientRect();
  const pixel = (place, length, pixels) => Math.min(pixels - 1, Math.max(0, Math.floor(place / length * pixels)));
  trigger('select', {
    x: pixel(event.clientX - box.left, box.width, Number(picture.dataset.width)),
    y: pixel(event.clientY - box.top, box.height, Number(picture.dataset.height)),
  });
});
"""
PICK_TILE = """
element.addEventListener('click', event => {
  const tile = event.target.closest('button');
  if (tile) trigger('select', {...tile.dataset});
});
"""


def build_page(explorer: Explorer) -> gr.Blocks:
    """The page of a network."""
    # Uploads are removed after ten minutes: by then they are long read.
    with gr.Blocks(title="gsanet explore", analytics_enabled=False, delete_cache=(600, 600)) as built:
        parts: dict[str, Any] = {"subject": gr.State(), "choice": gr.State()}
        _html(page.header(explorer))
        with gr.Row():
            with gr.Column(scale=4, min_width=320, elem_id="looked-at"):
                parts["picture"] = _html(name="picture", script=PICK_PIXEL)
                parts["samples"] = _html(page.samples(explorer), "samples", PICK_TILE)
                parts["file"] = gr.File(show_label=False, height=56, elem_id="file")
                parts["prediction"] = _html(name="prediction")
            with gr.Column(scale=9, min_width=480):
                with gr.Row(elem_id="controls"):
                    for name, scale in (("stage", 4), ("block", 5), ("head", 9)):
                        choices = list(explorer.blocks) if name == "stage" else []
                        parts[name] = gr.Radio(
                            choices, label=name.capitalize(), elem_id=name, scale=scale, min_width=100
                        )
                parts["branches"] = _html(name="branches", script=PICK_TILE)
                _html(page.legend())
                parts["heads"] = _html(name="heads", script=PICK_TILE)
                parts["stages"] = _html(name="stages", script=PICK_TILE)
                parts["exactness"] = _html(name="exactness")
        _connect(built, parts, Handlers(explorer))
    return built


def _connect(built: gr.Blocks, parts: dict[str, Any], answers: Handlers) -> None:
    look, picture = ([parts[name] for name in names] for names in (LOOK, PICTURE))
    state = [parts["subject"], parts["choice"]]
    controls = [parts[name] for name in ("stage", "block", "head")]

    def on(event: Callable, answer: Callable, inputs: list[Any], outputs: list[Any], **options: Any) -> None:
        # Of many clicks in a row the last one is answered, and nothing flickers meanwhile.
        event(answer, inputs, outputs, **{"trigger_mode": "always_last", "show_progress": "hidden", **options})

    on(built.load, answers.open_first, [], picture)
    progress = {"show_progress": "minimal", "show_progress_on": [parts["picture"]]}  # a large network takes seconds
    on(parts["samples"].select, answers.open_sample, [], picture, **progress)
    on(parts["file"].upload, answers.open_file, [parts["file"]], picture, **progress)
    on(parts["picture"].select, answers.pick_pixel, state, look)
    on(parts["branches"].select, answers.pick_branch, state, look)
    on(parts["heads"].select, answers.pick_head, state, look)
    on(parts["stages"].select, answers.pick_block, state, look)
    for control in controls:
        on(control.input, answers.set_controls, [*state, *controls], look)


def _html(value: str = "", name: str | None = None, script: str | None = None) -> gr.HTML:
    return gr.HTML(value, js_on_load=script, elem_id=name, elem_classes="gsa", apply_default_css=False)
