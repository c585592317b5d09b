"""Downloads from moto's S3 server: it checks that signed requests of `perilune fetch s3://…` are understood.

    python3 -m pip install 'moto[server]==5.2.1'
    python3 runtime/fetch/tests/s3_moto.py target/debug/perilune

moto refuses escaped keys of boto3 too, so their signatures are compared with botocore's. moto accepts any signature by default; with INITIAL_NO_AUTH_ACTION_COUNT it checks them, as here: the server is told the actions that set
it up, and refuses a request that is not signed by a known key.
"""

import os
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import boto3
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

# The actions that set the server up; then authorization begins. moto reads the number when it is imported.
os.environ["INITIAL_NO_AUTH_ACTION_COUNT"] = "7"
from moto.server import ThreadedMotoServer  # noqa: E402

PROGRAM = os.path.abspath(sys.argv[1])
CONTENT = bytes(range(256)) * 5000


def fetch_signed(base):
    """Whether the signatures of keys with escaped characters are those of botocore."""
    equal = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            keys = Credentials(base["AWS_ACCESS_KEY_ID"], "secret")
            names = [name for name in self.headers if name.lower() in ("host", "x-amz-content-sha256", "x-amz-date")]
            request = AWSRequest("GET", f"http://{self.headers['host']}{self.path}", headers={n: self.headers[n] for n in names})
            request.context["timestamp"] = self.headers["x-amz-date"]
            signer = S3SigV4Auth(keys, "s3", "us-east-1")
            signature = signer.signature(signer.string_to_sign(request, signer.canonical_request(request)), request)
            equal.append(self.headers["authorization"].endswith("Signature=" + signature))
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"x")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        env = base | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_SECRET_ACCESS_KEY": "secret"}
        for name in ["plain.bin", "folder/with space+plus.bin", "ä/ü=&%41.bin"]:
            subprocess.run([PROGRAM, "fetch", f"s3://corpus/{name}"], env=env, check=True, capture_output=True)
        server.shutdown()
    return equal


def main():
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
    names = ["plain.bin", "folder/deep-er/under_score~1.bin", "2.bin"]
    for name in names:
        s3.put_object(Bucket="corpus", Key=name, Body=CONTENT)
    with tempfile.TemporaryDirectory() as cache:
        base = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        base |= {"PERILUNE_CACHE": cache, "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": key["AccessKeyId"]}

        def fetch(name, secret):
            env = base | {"AWS_SECRET_ACCESS_KEY": secret}
            return subprocess.run([PROGRAM, "fetch", f"s3://corpus/{name}"], env=env, capture_output=True, text=True)

        for name in names:
            ran = fetch(name, key["SecretAccessKey"])
            assert ran.returncode == 0 and "1,280,000 bytes" in ran.stdout, (name, ran)
        assert fetch_signed(base) == [True, True, True]
        ran = fetch("plain.bin", "wrong")
        assert ran.returncode == 1 and "403 (SignatureDoesNotMatch)" in ran.stderr, ran
        ran = fetch("absent.bin", key["SecretAccessKey"])
        assert ran.returncode == 1 and "404 (NoSuchKey)" in ran.stderr, ran
    server.stop()
    print("moto: signed downloads are as expected")


main()
