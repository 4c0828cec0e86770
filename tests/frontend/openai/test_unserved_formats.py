"""A format for a model that no worker serves is logged once, and is no error."""

from structlog.testing import capture_logs

from controller.frontend.openai.output_formats import REPORT_AFTER_S, FormatTable


def test_a_format_for_an_unserved_model_is_logged_once() -> None:
    table = FormatTable({"m": "hermes", "lama": "llama3_json"}, {"lama": "qwen3"})
    with capture_logs() as logs:
        table.report_unserved((), 0.0)
        table.report_unserved({"m"}, 100.0)  # the first model is served: others may follow
        table.report_unserved({"m"}, 100.0 + REPORT_AFTER_S - 1)
        assert logs == []
        for now in (100.0 + REPORT_AFTER_S, 1000.0):
            table.report_unserved({"m", "llama"}, now)
    said = [(one["event"], one["setting"], one["model"], one["served"]) for one in logs]
    assert said == [
        ("format_of_unserved_model", setting, "lama", ["llama", "m"])
        for setting in ("tool_call_parsers", "reasoning_parsers")
    ]


def test_formats_of_served_models_are_not_logged() -> None:
    table = FormatTable({"m": "hermes"}, {})
    with capture_logs() as logs:
        for now in (0.0, 1000.0):
            table.report_unserved({"m"}, now)
    assert logs == []
