//! Signs requests of S3 by AWS Signature Version 4.
//!
//! The canonical request has the headers `host` and those of `signed`; the payload of a download is empty.

use crate::hash::hex;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// Keys of an account.
#[derive(Clone)]
pub(crate) struct Credentials {
    pub key: String,
    pub secret: String,
    pub token: Option<String>,
}

/// The hash of an empty payload.
pub(crate) const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    // HMAC takes keys of any length.
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key) else { return Vec::new() };
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

/// Returns the header `Authorization` of a GET. `time` is like `20130524T000000Z`; `path` and `query` are escaped, `signed`
/// has lower-case names and is sorted.
pub(crate) fn authorization(
    keys: &Credentials,
    service: &str,
    region: &str,
    time: &str,
    path: &str,
    query: &str,
    signed: &[(&str, String)],
    payload: &str,
) -> String {
    let day = time.get(..8).unwrap_or("");
    let headers: String = signed.iter().map(|(name, value)| format!("{name}:{}\n", value.trim())).collect();
    let names = signed.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
    let canonical = format!("GET\n{path}\n{query}\n{headers}\n{names}\n{payload}");
    let scope = format!("{day}/{region}/{service}/aws4_request");
    let to_sign = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", hex(&Sha256::digest(canonical.as_bytes())));
    let mut key = hmac(format!("AWS4{}", keys.secret).as_bytes(), day);
    for part in [region, service, "aws4_request"] {
        key = hmac(&key, part);
    }
    let signature = hex(&hmac(&key, &to_sign));
    format!("AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}", keys.key)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "GET Object" of "Examples: Signature Calculations" in the API reference of S3.
    #[test]
    fn the_example_of_the_s3_reference() {
        let keys = Credentials {
            key: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
        };
        let signed = [
            ("host", "examplebucket.s3.amazonaws.com".to_string()),
            ("range", "bytes=0-9".to_string()),
            ("x-amz-content-sha256", EMPTY.to_string()),
            ("x-amz-date", "20130524T000000Z".to_string()),
        ];
        let header = authorization(&keys, "s3", "us-east-1", "20130524T000000Z", "/test.txt", "", &signed, EMPTY);
        assert_eq!(
            header,
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, \
             SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, \
             Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
        );
    }

    /// `get-vanilla` and `get-vanilla-query-order-key-case` of the AWS Signature V4 test suite.
    #[test]
    fn cases_of_the_aws_test_suite() {
        let keys = Credentials {
            key: "AKIDEXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY".into(),
            token: None,
        };
        let signed = [("host", "example.amazonaws.com".to_string()), ("x-amz-date", "20150830T123600Z".to_string())];
        for (query, signature) in [
            ("", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
            ("Param1=value1&Param2=value2", "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"),
        ] {
            let header = authorization(&keys, "service", "us-east-1", "20150830T123600Z", "/", query, &signed, EMPTY);
            assert!(header.ends_with(&format!("Signature={signature}")), "{header}");
        }
    }
}
