"""How a classifier errs, as a picture: confusions, and whether it is as sure as it is right."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from mimkit.downstream.predictions import Predictions
from mimkit.downstream.scores import calibration, classification_scores, confusion_matrix
from mimkit.files import atomic_file

_NAMED = 40  # classes; the names of more would not be readable


def save_confusion_picture(path: Path, predictions: Predictions) -> None:
    """A PNG: shares of each class's images by what they were taken for, and the calibration."""
    figure = Figure(figsize=(13, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # objects only, never pyplot: nothing global
    scores = classification_scores(predictions)
    figure.suptitle(f"{scores.top1} of {scores.top1.total} images right", fontsize=14)
    left, right = figure.subplots(1, 2)
    count_VV = confusion_matrix(predictions).numpy()
    share_VV = count_VV / np.maximum(count_VV.sum(1, keepdims=True), 1)
    colours = left.imshow(share_VV, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    left.set(xlabel="predicted", ylabel="class", title="confusion, share of each class's images")
    num, names = predictions.num_classes, predictions.classes
    if num <= _NAMED:
        labels = names or tuple(map(str, range(num)))
        left.set_xticks(range(num), labels, rotation=90)
        left.set_yticks(range(num), labels)
    figure.colorbar(colours, ax=left, shrink=0.8)
    found = calibration(predictions)
    middles = (np.arange(len(found.share_K)) + 0.5) / len(found.share_K)
    right.plot([0, 1], [0, 1], color="grey", ls="--", label="calibrated")
    right.bar(middles, np.nan_to_num(found.accuracy_K.numpy()), width=0.9 / len(middles),
              label="accuracy of the images")  # fmt: skip
    right.plot(middles, found.share_K.numpy(), color="black", marker=".", label="share of images")
    right.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence in the best class",
              title=f"calibration, ECE {scores.ece:.3f}")  # fmt: skip
    right.legend()
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")
