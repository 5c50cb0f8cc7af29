"""Policies to tick on the what-if page, and the prediction of those ticked; the timeline draws it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dash import ALL, Dash, Input, Output, State, ctx, dcc, html, no_update

from memprof.errors import MemprofError
from memprof.units import format_bytes, format_bytes_change, format_us
from memprof_dashboard import ids, parts
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View
from memprof_dashboard.summary_bar import budget_of

# What predicts a plan is imported at use: the first timeline does not wait for it.
if TYPE_CHECKING:
    from memprof.analysis.plans.predict import Forecast
    from memprof_dashboard.whatif.draft import Offer

_FORM = "draft-form"
_TICKS = "draft-ticks"
#: Type of the fields that choose modules, one for each policy.
_MODULES = "draft-modules"
_RESULT = "draft-result"
_CLEAR = "draft-clear"
_SAVE = "draft-save"
_FILE = "draft-file"
_CLOCK = "draft-clock"

#: Interval between two looks at dry runs, in milliseconds.
_TICK_MS = 1_000


def layout() -> html.Section:
    """Returns the containers of the form and the prediction; the form needs the step, which takes a while to read."""
    labelled: Any = {"aria-label": "try a plan"}
    return html.Section(
        [
            html.H3("Try a plan"),
            parts.note("Tick policies or choose modules: the timeline above draws the predicted step at once."),
            dcc.Loading(html.Div(id=_FORM), delay_show=400, type="dot"),
            html.Div(id=_RESULT, role="status"),
            dcc.Interval(id=_CLOCK, interval=_TICK_MS, disabled=True),
            dcc.Download(id=_FILE),
        ],
        className="draft",
        **labelled,
    )


def register(app: Dash, workspace: Workspace) -> None:
    """Registers the callbacks."""

    def offered(view: View) -> Offer:
        from memprof_dashboard.whatif.draft import offer_of

        return offer_of(workspace.rank(view.trace, view.rank))

    @app.callback(Output(_FORM, "children"), Input(ids.PLACE, "data"), State(ids.VIEW, "data"))
    def fill(place: Any, whole: Any) -> Any:
        view = View.from_json(place)
        try:
            offer = offered(view)
        except MemprofError as error:
            return parts.note(f"No plan can be predicted from this recording: {error}")
        if not offer.settings and not offer.choices:
            return parts.note(
                "No policy can be predicted from this recording: it does not say which tensors operators read and save "
                "for backward. Record the job with memprof record."
            )
        return _form(offer, View.from_json(whole).plan)

    @app.callback(
        Output(ids.GO, "data", allow_duplicate=True),
        Input(_TICKS, "value"),
        Input({"type": _MODULES, "policy": ALL}, "value"),
        State(ids.VIEW, "data"),
        prevent_initial_call=True,
    )
    def choose(ticked: Any, _: Any, whole: Any) -> Any:
        view = View.from_json(whole)
        fields = ctx.inputs_list[1]
        modules = {str(field["id"]["policy"]): map(str, field.get("value") or ()) for field in fields}
        text = offered(view).text_of(map(str, ticked or ()), modules)
        return no_update if text == view.plan else {"plan": text}

    # The plan also changes by a link, by Back, or by Clear.
    @app.callback(
        Output(_TICKS, "value"),
        Output({"type": _MODULES, "policy": ALL}, "value"),
        Input(ids.WINDOW, "data"),
        State(_TICKS, "value"),
        State({"type": _MODULES, "policy": ALL}, "value"),
        prevent_initial_call=True,
    )
    def follow(window: Any, ticked: Any, chosen: Any) -> Any:
        view = View.from_json(window)
        names = [str(field["id"]["policy"]) for field in ctx.outputs_list[1]]
        try:
            offer = offered(view)
        except MemprofError:
            return no_update, [no_update] * len(names)
        modules = {name: list(map(str, own or ())) for name, own in zip(names, chosen, strict=True)}
        if window is None or offer.text_of(map(str, ticked or ()), modules) == view.plan:
            return no_update, [no_update] * len(names)
        ticks, wanted = offer.chosen_in(view.plan)
        return ticks, [wanted.get(name, []) for name in names]

    @app.callback(Output(ids.GO, "data", allow_duplicate=True), Input(_CLEAR, "n_clicks"), prevent_initial_call=True)
    def clear(clicks: Any) -> Any:
        return {"plan": ""} if clicks else no_update

    @app.callback(Output(ids.DRY, "data"), Input(_CLOCK, "n_intervals"), State(ids.DRY, "data"))
    def look(_: Any, before: Any) -> Any:
        now = workspace.dry_frames.finished
        return no_update if now == (before or 0) else now

    @app.callback(
        Output(_RESULT, "children"),
        Output(_CLOCK, "disabled"),
        Input(ids.WINDOW, "data"),
        Input(ids.DRY, "data"),
    )
    def predict(window: Any, _: Any) -> Any:
        shown = predicted(window)
        return shown, not workspace.dry_frames.is_running

    def predicted(window: Any) -> Any:
        view = View.from_json(window)
        if window is None or not view.plan:
            return None
        from memprof_dashboard.whatif.draft import draft_of
        from memprof_dashboard.whatif.planning import counts_reserved

        try:
            rank = workspace.rank(view.trace, view.rank)
            made = draft_of(rank, view.plan, workspace.dry_frames)
            is_device = counts_reserved(rank, view.budget)
        except MemprofError as error:
            return [html.P(str(error), className="warning"), _clear()]
        return None if made is None else _result(made, view, counts_reserved=is_device)

    @app.callback(Output(_FILE, "data"), Input(_SAVE, "n_clicks"), State(ids.VIEW, "data"), prevent_initial_call=True)
    def save(clicks: Any, whole: Any) -> Any:
        from memprof.policies.plan.plan_file import format_plan
        from memprof_dashboard.whatif.draft import draft_of

        view = View.from_json(whole)
        rank = workspace.rank(view.trace, view.rank)
        made = draft_of(rank, view.plan, workspace.dry_frames) if clicks else None
        if made is None:
            return no_update
        return {"content": format_plan(made.plan), "filename": "plan.toml", "type": "application/toml"}


def _form(offer: Offer, text: str) -> Any:
    ticked, modules = offer.chosen_in(text)
    settings = [{"label": parts.name(name, 60), "value": name} for name in offer.settings]
    return html.Div(
        [
            html.Fieldset(
                [
                    html.Legend("for the whole step", className="unseen"),
                    dcc.Checklist(settings, ticked, id=_TICKS, inline=True, className="chips"),
                ]
            ),
            *(
                parts.control(
                    choice.name,
                    dcc.Dropdown(
                        [{"label": label, "value": name} for name, label in choice.modules.items()],
                        modules.get(choice.name, []),
                        id={"type": _MODULES, "policy": choice.name},
                        multi=True,
                        placeholder="choose modules",
                    ),
                )
                for choice in offer.choices.values()
            ),
        ],
        className="draft-form",
    )


def _clear() -> html.Button:
    return html.Button("Clear", id=_CLEAR, type="button", title="back to the timeline as recorded")


def _result(made: Forecast, view: View, *, counts_reserved: bool) -> list[Any]:
    """Returns the prediction: peak, reserved bytes and step time before and after, and how to train under the plan.

    Args:
        made: The prediction.
        view: The view; its budget is one of allocated bytes.
        counts_reserved: Whether the budget is the device's, in which reserved bytes must fit.
    """
    from memprof.analysis.plans.predict import commands_under
    from memprof_dashboard.whatif.plan_parts import command_of

    before, after = made.recorded, made.predicted
    ratio = after.step_time_us / before.step_time_us - 1 if before.step_time_us else math.nan
    rows: list[list[Any]] = [
        [
            "peak allocated",
            format_bytes(before.peak.allocated_bytes),
            format_bytes(after.peak.allocated_bytes),
            format_bytes_change(after.peak.allocated_bytes - before.peak.allocated_bytes),
        ],
        [
            "step time",
            format_us(before.step_time_us),
            format_us(after.step_time_us),
            f"{100 * ratio:+.1f} %" if math.isfinite(ratio) else "unknown",
        ],
    ]
    needed, words = after.peak.allocated_bytes, ""
    if before.reserved_bytes is not None and after.reserved_bytes is not None:
        if counts_reserved:
            needed, words = after.reserved_bytes, f" with {format_bytes(after.reserved_bytes)} reserved"
        change = format_bytes_change(after.reserved_bytes - before.reserved_bytes)
        rows.insert(
            1, ["peak reserved", format_bytes(before.reserved_bytes), format_bytes(after.reserved_bytes), change]
        )
    sentence: list[Any] = [html.Strong(format_bytes(after.peak.allocated_bytes)), f" in {after.peak.describe()}"]
    if budget := budget_of(view.budget, before.peak.allocated_bytes):
        over = needed - budget
        limit, size = format_bytes(budget), format_bytes(abs(over))
        fits = f"over the budget of {limit} by {size}" if over > 0 else f"fits the budget of {limit}, {size} to spare"
        sentence.append(f"; {fits}{words}")
    return [
        html.P([*sentence, ". ", _clear()], className="draft-verdict"),
        parts.table(["quantity", ">recorded", ">with the plan", ">change"], rows, label="effect of the plan"),
        *(html.P(parts.name(warning, 400), className="note") for warning in made.warnings),
        *command_of(_SAVE, commands_under(made.manifest, "plan.toml")),
    ]
