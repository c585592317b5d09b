"""Downloads from moto's S3 server: it checks that signed requests of `perilune fetch s3://…` are understood.

    python3 -m pip install 'moto[server]==5.2.1'
    python3 runtime/fetch/tests/s3_moto.py target/debug/perilune

moto accepts any signature by default; with INITIAL_NO_AUTH_ACTION_COUNT it checks them, as here: the server is told the actions that set
it up, and refuses a request that is not signed by a known key.
"""

import os
import subprocess
import sys
import tempfile

import boto3
from moto.server import ThreadedMotoServer

PROGRAM = os.path.abspath(sys.argv[1])
CONTENT = bytes(range(256)) * 5000


def main():
    # create_user, put_user_policy, create_access_key; then authorization begins.
    os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = "3"
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    none = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1", "endpoint_url": endpoint}
    iam = boto3.client("iam", **none)
    iam.create_user(UserName="reader")
    policy = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
    iam.put_user_policy(UserName="reader", PolicyName="all", PolicyDocument=policy)
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    own = {**none, "aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
    s3 = boto3.client("s3", **own)
    s3.create_bucket(Bucket="corpus")
    with tempfile.TemporaryDirectory() as cache:
        base = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        base |= {"PERILUNE_CACHE": cache, "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key["AccessKeyId"]}

        def fetch(name, secret):
            env = base | {"AWS_SECRET_ACCESS_KEY": secret}
            return subprocess.run([PROGRAM, "fetch", f"s3://corpus/{name}"], env=env, capture_output=True, text=True)

        for name in ["plain.bin", "folder/with space+plus.bin", "ä/ü=&.bin"]:
            s3.put_object(Bucket="corpus", Key=name, Body=CONTENT)
            ran = fetch(name, key["SecretAccessKey"])
            assert ran.returncode == 0 and "1,280,000 bytes" in ran.stdout, (name, ran)
        ran = fetch("plain.bin", "wrong")
        assert ran.returncode == 1 and "403 (SignatureDoesNotMatch)" in ran.stderr, ran
        ran = fetch("absent.bin", key["SecretAccessKey"])
        assert ran.returncode == 1 and "404 (NoSuchKey)" in ran.stderr, ran
    server.stop()
    print("moto: signed downloads are as expected")


main()
