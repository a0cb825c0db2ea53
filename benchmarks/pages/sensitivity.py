"""The table of decision 18 on predicted losses: how near they are."""

from markdown import load, table


def sensitivity() -> str:
    """How the prediction ranks, what it costs, and what ranking by SQNR says instead."""
    rows = [
        [
            name,
            str(found["tensors"]),
            f"{found['rank_correlation']:.3f}",
            f"{found['sqnr_rank_correlation']:.2f}",
            " to ".join(f"{found['ratio_percentiles_5_50_95'][end]:.2f}" for end in (0, 2)),
            f"{found['passes']:.1f}",
            f"{found['full_passes']:.0f}",
        ]
        for name, found in load("sensitivity")["results"].items()
    ]
    head = ["model", "tensors", "rank correlation", "SQNR's"]
    return table([*head, "predicted over measured, 90 %", "passes", "of the full measurement"], rows)


DECISION_TABLES = (sensitivity,)
