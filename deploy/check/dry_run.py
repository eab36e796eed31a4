"""ParallelCluster's schema and its dry run, against a stand-in for AWS on this machine.

A program of its own, for a Python that has what dry_run_requirements.txt names. Prints a list of problems for each
configuration, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# moto has no placement groups, and refuses a launch template with the instance's own disks.
_NOT_IN_MOTO = ("PlacementGroupNaming", "HeadNodeLaunchTemplate", "ComputeResourceLaunchTemplate")


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """A server that answers as AWS does, and an environment that leads there."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ.update(AWS_ENDPOINT_URL=f"http://{host}:{port}", AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        server.stop()


def _furnish(text: str, region: str) -> Any:
    """The configuration, with subnets and an image that exist in the stand-in."""
    import boto3
    import yaml

    ec2 = boto3.client("ec2", region_name=region)
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    for attribute in ("EnableDnsSupport", "EnableDnsHostnames"):
        ec2.modify_vpc_attribute(VpcId=vpc, **{attribute: {"Value": True}})
    for number, subnet in enumerate(sorted(set(re.findall(r"subnet-[0-9a-f]+", text)))):
        made = ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{number}.0/24", AvailabilityZone=f"{region}a")
        text = text.replace(subnet, made["Subnet"]["SubnetId"])
    configuration = yaml.safe_load(text)
    images = ec2.describe_images(Filters=[{"Name": "architecture", "Values": ["x86_64"]}])["Images"]
    configuration.setdefault("Image", {})["CustomAmi"] = images[0]["ImageId"]
    configuration.get("HeadNode", {}).get("Ssh", {}).pop("KeyName", None)  # moto does not tell the type of a key
    return configuration


def _problems(path: Path) -> list[str]:
    import pcluster.lib
    from pcluster.api.errors import CreateClusterBadRequestException, DryrunOperationException

    text = path.read_text()
    region = (re.findall(r"^Region: *([\w-]+)", text, re.MULTILINE) or ["us-east-1"])[0]
    try:
        pcluster.lib.create_cluster(
            cluster_name="jaxhetero",
            cluster_configuration=_furnish(text, region),
            region=region,
            dryrun=True,
            suppress_validators=[f"type:{name}Validator" for name in _NOT_IN_MOTO],
        )
    except DryrunOperationException:
        return []
    except CreateClusterBadRequestException as error:
        content = error.content
        found = content.configuration_validation_errors or []
        return [each.message for each in found if each.level == "ERROR"] or [content.message]
    raise AssertionError("a dry run ends with an exception")


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr), _stand_in():
        answers = [_problems(Path(name)) for name in sys.argv[1:]]
    print(json.dumps(answers))
