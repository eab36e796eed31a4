"""``python -m deploy.check``: are the configurations of this folder what their engines accept?"""
