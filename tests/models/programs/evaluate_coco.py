"""One worker of an evaluation by a detector that knows the answers: the scores and findings of its rank as JSON."""

import json
import sys
from pathlib import Path

import jaxhetero
from models.common.batches import BatchSplit
from models.mask_rcnn.evaluate import Evaluation, gather_bytes
from tests.models.test_mask_rcnn_evaluate import coco_data, oracle

LARGE = 1_500_000

jaxhetero.initialize()
rank, count = jaxhetero.rank(), jaxhetero.size()
everyone = gather_bytes(bytes([rank]) * (rank * LARGE))
assert [(len(part), set(part)) for part in everyone[1:]] == [(LARGE * other, {other}) for other in range(1, count)]

evaluation = Evaluation(
    lambda state, batch: oracle(batch), coco_data(Path(sys.argv[1])), BatchSplit(2 * count, 2, rank, count)
)
scores = evaluation(None)
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps([scores, evaluation.findings]))
jaxhetero.shutdown()
