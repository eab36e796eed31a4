"""``python -m deploy.check``: are the configurations of this folder what Kubernetes and AWS accept?"""
