"""The launchers of clusters: what starts a job's workers and reducers there."""
