"""The monitor says what a run would otherwise pass over: updates that changed nothing, metrics that are no numbers."""

from types import SimpleNamespace

from unirl.trainer.monitoring import Monitor


class Record:
    """Takes the words of a tracker."""

    def __init__(self):
        self.events, self.warnings = [], []

    def event(self, name, **fields):
        self.events.append((name, fields["alarm"], fields["value"]))

    def warn(self, text):
        self.warnings.append(text)


def monitor() -> Monitor:
    return Monitor(Record(), SimpleNamespace(num_updates=2), "image", False, True)


def test_a_skipped_update_is_an_event_each_time_and_a_warning_once():
    watched = monitor()
    for _ in range(2):
        watched.watch_updates({"train/skipped_updates": 1.0, "train/lr": 1e-3})
    assert watched.tracker.events == [("alarm.raise", "update.skipped", 1.0)] * 2
    assert [text[:45] for text in watched.tracker.warnings] == ["1 of 2 updates of a step changed no weight: t"]


def test_a_metric_that_is_not_finite_is_named():
    watched = monitor()
    watched.watch_updates({"custom/mine": float("nan"), "train/ratio_max": float("inf"), "train/loss": 0.5})
    watched.watch_updates({"custom/mine": float("nan")})
    assert [value for _, _, value in watched.tracker.events] == ["custom/mine", "train/ratio_max", "custom/mine"]
    assert watched.tracker.warnings == [
        "the metric custom/mine of a step is nan",
        "the metric train/ratio_max of a step is inf",
    ]


def test_a_healthy_update_says_nothing():
    watched = monitor()
    watched.watch_updates({"train/skipped_updates": 0.0, "train/loss": 0.5})
    assert not watched.tracker.events and not watched.tracker.warnings
