"""Code that the reference trainers share: batches, records, the loop over steps, checkpoints, reports."""
