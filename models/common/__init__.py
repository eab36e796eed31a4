"""What the reference trainers share: recipes, records, the loop over steps, checkpoints, reports."""
