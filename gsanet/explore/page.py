"""The parts of the page as HTML. What they say is escaped: names of files and classes are a user's."""

from collections.abc import Iterable
from html import escape

from gsanet.explain.colours import has_large_pixels, limit_of, merge_heads
from gsanet.explain.maps import Array, Explanation
from gsanet.explore import heat
from gsanet.explore.study import Choice, Explorer, Place, Study, Subject, branch_maps

# Title, and in plain words what the map shows.
BRANCH_WORDS = {
    "both": ("Together", "All that it takes: content plus position."),
    "content": ("Content", "Because of <b>what</b> is there, wherever that is."),
    "position": ("Position", "Because of <b>where</b> it is: column times row."),
    "column": ("Column", "Step one: its row looks up and down, each pixel in its own column."),
    "row": ("Row", "Step two: it looks left and right along its row."),
}


def header(explorer: Explorer) -> str:
    """The title, and what to do."""
    classes = len(explorer.classifier.class_names)
    height, width = explorer.classifier.transform.settings.img_size
    facts = [escape(explorer.classifier.name), f"sees {width}x{height}", f"{len(explorer.places)} attention blocks"]
    if classes:
        facts.append(f"{classes} classes")
    return (
        "<h1>Where does a pixel look?</h1>"
        "<p>Click the picture. The maps show from where that pixel takes what it becomes: the network's own weights, "
        f"exact, not estimated.</p><p class='faint'>{' · '.join(facts)}</p>"
    )


def samples(explorer: Explorer) -> str:
    """Small pictures to choose from."""
    tiles = (
        f"<button data-sample='{escape(name)}' title='{escape(name)}'>"
        f"<img src='{heat.thumbnail(image, 96)}' alt='{escape(name)}'></button>"
        for name, image in explorer.samples.items()
    )
    kind = "samples pixels" if all(map(has_large_pixels, explorer.samples.values())) else "samples"
    return f"<div class='{kind}'>{''.join(tiles)}</div>"


def photograph(subject: Subject, at: tuple[int, int]) -> str:
    """The picture with what is not seen of it veiled, and a mark where it was clicked."""
    height, width = subject.view.size
    left, top, right, bottom = subject.view.box
    seen = _box(left / width, top / height, (right - left) / width, (bottom - top) / height)
    x, y = ((place + 0.5) / length for place, length in zip(at, (width, height), strict=True))
    kind = "photograph pixels" if has_large_pixels(subject.displayed) else "photograph"
    note = f" · {escape(subject.note)}" if subject.note else ""
    return (
        f"<div class='{kind}' data-width='{width}' data-height='{height}' style='--ratio:{width / height:.6f}'>"
        f"<img src='{heat.picture(subject)}' alt='{escape(subject.name)}' draggable='false' decoding='sync'>"
        f"<i class='seen' style='{seen}'></i><i class='cross' style='left:{x:.3%};top:{y:.3%}'></i></div>"
        f"<p class='faint'>{escape(subject.name)}{note} · {width}x{height} · pixel {at[0]}, {at[1]}</p>"
    )


def prediction(study: Study) -> str:
    """The likeliest classes with bars."""
    rows = (
        f"<tr><th>{escape(guess.name.replace('_', ' '))}</th>"
        f"<td><i style='width:{guess.probability:.2%}'></i></td><td>{guess.probability:.1%}</td></tr>"
        for guess in study.guesses
    )
    return f"<h2>What the network sees</h2><table class='guesses'>{''.join(rows)}</table>"


def branches(study: Study, explanation: Explanation, choice: Choice) -> str:
    """Every branch of the block at hand, with its scale and what it means."""
    signed = choice.head > 0 or len(explanation.values) == 1
    cards = []
    for branch, weights in branch_maps(explanation).items():
        title, words = BRANCH_WORDS[branch]
        shown = _of_head(weights, choice.head)
        limit = limit_of(shown)
        scale = (
            f"<span class='scale'><i style='background:{heat.gradient(signed)}'></i>"
            f"<span>{_number(-limit) if signed else '0'}</span><span>{_number(limit)}</span></span>"
        )
        tile = _map(shown, limit, signed, explanation, f"{title} map")
        body = f"<b class='title'>{title}</b>{tile}{scale}<span class='words'>{words}</span>"
        cards.append(_tile(body, branch == choice.branch, branch=branch))
    stage, block = choice.place
    (height, width), heads = explanation.size, len(explanation.values)
    which = f"head {choice.head}" if choice.head else "all heads" if heads > 1 else "its one head"
    return _section(
        study,
        f"Stage {stage}, block {block}, {which} <small>on a map of {width}x{height}</small>",
        f"<div class='branches'>{''.join(cards)}</div>",
    )


def heads(study: Study, explanation: Explanation, choice: Choice) -> str:
    """One branch of the block at hand, head by head, all on one scale."""
    weights = branch_maps(explanation)[choice.branch]
    limit = limit_of(weights)
    tiles = []
    if len(weights) > 1:
        merged = _of_head(weights, 0)
        drawn = _map(merged, limit_of(merged), False, explanation, "all heads")
        tiles.append(_tile(f"{drawn}<b>all</b>", choice.head == 0, head=0))
    for number, shown in enumerate(weights, 1):
        drawn = _map(shown, limit, True, explanation, f"head {number}")
        tiles.append(_tile(f"{drawn}<b>{number}</b>", choice.head == number, head=number))
    title = f"Its heads <small>{BRANCH_WORDS[choice.branch][0].lower()}, each head on the same scale</small>"
    return _section(study, title, f"<div class='heads'>{''.join(tiles)}</div>")


def stages(study: Study, explanations: dict[Place, Explanation], choice: Choice) -> str:
    """One branch of every block of the network, each on its own scale."""
    rows: dict[int, list[str]] = {}
    for place, explanation in explanations.items():
        stage, block = place
        weights = branch_maps(explanation).get(choice.branch)
        height, width = explanation.size
        if weights is None:
            drawn = "<span class='map none'></span>"
        else:
            head = choice.head if choice.head <= len(weights) else 0
            shown = _of_head(weights, head)
            signed = head > 0 or len(weights) == 1
            drawn = _map(shown, limit_of(shown), signed, explanation, f"stage {stage}, block {block}")
        label = f"<span>block {block} <small>{width}x{height}</small></span>"
        tile = _tile(f"{drawn}{label}", place == choice.place, stage=stage, block=block)
        rows.setdefault(stage, []).append(tile)
    body = "".join(
        f"<div class='stage'><b>Stage {stage}</b><div class='blocks'>{''.join(tiles)}</div></div>"
        for stage, tiles in rows.items()
    )
    which = f"head {choice.head}" if choice.head else "all heads"
    small = f"{BRANCH_WORDS[choice.branch][0].lower()}, {which}, each on its own scale"
    return _section(study, f"All stages at a glance <small>{small}</small>", f"<div class='stages'>{body}</div>")


def legend() -> str:
    """How to read the maps."""
    scales = {False: "all heads: takes nothing … takes most", True: "one head: is subtracted … is added"}
    bars = (
        f"<span><i class='bar' style='background:{heat.gradient(signed)}'></i>{words}</span>"
        for signed, words in scales.items()
    )
    return f"<div class='legend'><span><i class='box'></i>the pixel you clicked</span>{''.join(bars)}</div>"


def exactness(explanation: Explanation) -> str:
    """How well the weights give the module's own output back."""
    return (
        "<p class='faint'>Checked for this pixel: weights times values give the block's own output back, to a relative "
        f"error of {explanation.error:.0e}. A map explains one block: what its pixels had seen before is not in it.</p>"
    )


def _section(study: Study, title: str, body: str) -> str:
    height, width = study.subject.view.input_size
    style = f"--shade:url({heat.shade(study.subject)});--shape:{width}/{height}"
    kind = "pixels" if has_large_pixels(study.subject.displayed) else ""
    return f'<section class="{kind}" style="{style}"><h2>{title}</h2>{body}</section>'


def _tile(body: str, chosen: bool, **picks: object) -> str:
    data = " ".join(f"data-{name}='{value}'" for name, value in picks.items())
    return f"<button class='tile' aria-pressed='{str(chosen).lower()}' {data}>{body}</button>"


def _map(weights: Array, limit: float, signed: bool, explanation: Explanation, words: str) -> str:
    (rows, columns), (x, y) = explanation.size, explanation.pixel
    mark = _box(y / columns, x / rows, 1 / columns, 1 / rows)
    return (
        f"<span class='map'><img src='{heat.heat_map(weights, limit, signed)}' alt='{words}'>"
        f"<i class='mark' style='{mark}'></i></span>"
    )


def _of_head(weights: Array, head: int) -> Array:
    return merge_heads(weights, [head - 1] if head else list(range(len(weights))))


def _box(left: float, top: float, width: float, height: float) -> str:
    shares: Iterable[tuple[str, float]] = (("left", left), ("top", top), ("width", width), ("height", height))
    return ";".join(f"{name}:{share:.3%}" for name, share in shares)


def _number(value: float) -> str:
    return f"{value:.2g}"
