//! Signs a bundle and checks signatures, in the files of minisign (`BUNDLE.minisig`; <https://jedisct1.github.io/minisign/>).
//!
//! The signature is Ed25519 over BLAKE2b of the file, so `minisign -Vm BUNDLE -P KEY` checks it too. Its untrusted comment
//! contains the public key: a reader can check the signature without having met the key, and then knows which key signed, not
//! whose it is. Whose it is, the person says: by a key on the command line, or by a file among the trusted keys.

use crate::error::{Error, Result, io};
use ct_codecs::{Base64, Decoder};
use minisign::{KeyPair, PublicKey, PublicKeyBox, SecretKey, SecretKeyBox, SignatureBox};
use perilune_policy::Directory;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What the untrusted comment says before the key.
const COMMENT: &str = "signature of a Perilune bundle, by the key ";
/// Bytes of a key or signature file.
const LONGEST: u64 = 1 << 16;
/// Bytes of a secret key.
const SECRET_BYTES: usize = 158;

/// The key of a valid signature.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signer {
    /// The public key in base 64, as minisign writes it: `RW…`.
    pub key: String,
    /// The name of the trusted key that it is.
    pub name: Option<String>,
}

/// Returns the file of the signature of a bundle.
pub fn signature_path(bundle: &Path) -> PathBuf {
    let mut name = bundle.as_os_str().to_os_string();
    name.push(".minisig");
    PathBuf::from(name)
}

/// Reads a small text file; `None` if there is none. What is no regular file is refused and never waited for, since a signature
/// comes with a bundle that is not trusted.
fn text(path: &Path) -> Result<Option<String>> {
    if std::fs::metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
        return Ok(None);
    }
    let refused = |e: perilune_policy::Error| Error::Refused(format!("cannot open {}: {}", path.display(), e.rule()));
    let file = perilune_policy::open_named(path).map_err(refused)?.into_file();
    let mut bytes = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut bytes).map_err(io("read", path))?;
    if bytes.len() as u64 > LONGEST {
        return Err(Error::Refused(format!(
            "{}: has more than {LONGEST} bytes, and is no key or signature",
            path.display()
        )));
    }
    // The formats are ASCII but for comments: what is no UTF-8 fails where the text is parsed.
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Reads the secret key of a file that `minisign -G` or [`generate`] wrote. A password is asked for at the terminal.
///
/// # Errors
/// The file is missing or no secret key, or the password is wrong.
pub fn secret_key(path: &Path, has_terminal: bool) -> Result<SecretKey> {
    let shown = path.display();
    let text = text(path)?.ok_or_else(|| {
        Error::Usage(format!("there is no key file {shown}\n  hint: perilune bundle key {shown} makes one"))
    })?;
    let wrong = |e: minisign::PError| Error::Usage(format!("{shown}: is no secret key of minisign: {e}"));
    if !text.starts_with("untrusted comment:") {
        return Err(Error::Usage(format!("{shown}: is no secret key of minisign")));
    }
    if let Some(key) = unencrypted(&text) {
        return Ok(key);
    }
    if !has_terminal {
        let cure = "sign at a terminal, or with a key without a password: perilune bundle key --no-password";
        return Err(Error::Usage(format!(
            "{shown}: the key has a password, and there is no terminal to ask for it\n  hint: {cure}"
        )));
    }
    SecretKeyBox::from_string(&text).and_then(|key| key.into_secret_key(None)).map_err(wrong)
}

/// Reads a key without a password. Minisign 0.11 writes it without a checksum, which the library refuses, so its parts are read here.
fn unencrypted(text: &str) -> Option<SecretKey> {
    let bytes = Base64::decode_to_vec(text.lines().nth(1)?.trim(), None).ok()?;
    // The algorithm of the signature, and none that derives a key from a password.
    let plain = bytes.len() == SECRET_BYTES && bytes[..4] == *b"Ed\0\0";
    plain.then(|| SecretKey::from_bytes(&bytes).ok()).flatten()
}

/// Makes a key pair: `path` gets the secret key, and the same name ending in `.pub` the public one. Returns the public key.
///
/// # Errors
/// A file of that name exists, or cannot be written.
pub fn generate(path: &Path, with_password: bool) -> Result<String> {
    let public = path.with_extension("pub");
    for path in [path, &public] {
        if path.exists() {
            return Err(Error::Usage(format!("{} exists; a key is never replaced", path.display())));
        }
    }
    let made =
        if with_password { KeyPair::generate_encrypted_keypair(None) } else { KeyPair::generate_unencrypted_keypair() };
    let pair = made.map_err(|e| Error::Usage(format!("cannot make a key: {e}")))?;
    let texts = pair.sk.to_box(Some("secret key of a Perilune author")).and_then(|s| Ok((s, pair.pk.to_box()?)));
    let (secret, shown) = texts.map_err(|e| Error::Usage(format!("cannot make a key: {e}")))?;
    private(path, secret.into_string().as_bytes())?;
    std::fs::write(&public, shown.into_string()).map_err(io("write", &public))?;
    Ok(pair.pk.to_base64())
}

/// Writes a new file that only its owner reads.
fn private(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(bytes)).map_err(io("write", path))
}

/// Signs a bundle with a key, and returns the public key. The signature is written beside it.
///
/// # Errors
/// The bundle cannot be read, or the signature cannot be written.
pub fn sign(bundle: &Path, key: &SecretKey, hash: &str) -> Result<String> {
    let failed = |e: minisign::PError| Error::Usage(format!("cannot sign {}: {e}", bundle.display()));
    let public = PublicKey::from_secret_key(key).map_err(failed)?;
    let name = bundle.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let trusted = format!("file:{name}\tblake3:{hash}");
    let file = File::open(bundle).map_err(io("read", bundle))?;
    let comment = format!("{COMMENT}{}", public.to_base64());
    let signature = minisign::sign(Some(&public), key, file, Some(&trusted), Some(&comment)).map_err(failed)?;
    let to = signature_path(bundle);
    let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = to.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let written = Directory::open(folder).and_then(|dir| dir.replace(&name, signature.to_string().as_bytes()));
    written.map_err(|e| Error::Usage(format!("cannot write {}: {}", to.display(), e.rule())))?;
    Ok(public.to_base64())
}

/// Reads a public key: its text, or the name of a file with it.
///
/// # Errors
/// It is neither.
pub fn public_key(given: &str) -> Result<PublicKey> {
    if let Some(key) = key_of(given) {
        return Ok(key);
    }
    let wrong =
        || Error::Usage(format!("--key {given}: is neither a public key of minisign (RW…) nor a file with one"));
    let text = text(Path::new(given))?.ok_or_else(wrong)?;
    parse_public(&text).ok_or_else(wrong)
}

fn parse_public(text: &str) -> Option<PublicKey> {
    key_of(&PublicKeyBox::from_string(text).ok()?.into_public_key().ok()?.to_base64())
}

/// Parses a public key. The library takes any name of an algorithm, so that a key would have several texts; it is `Ed` here.
fn key_of(text: &str) -> Option<PublicKey> {
    let key = PublicKey::from_base64(text).ok()?;
    let bytes = Base64::decode_to_vec(key.to_base64(), None).ok()?;
    bytes.starts_with(b"Ed").then_some(key)
}

/// The keys that the person trusts: files `NAME.pub` of a folder.
#[derive(Clone, Default, Debug)]
pub struct TrustedKeys(Vec<(String, String)>);

impl TrustedKeys {
    /// Reads a folder; one that is not there has no keys. Files that are no keys are left out.
    pub fn read(folder: &Path) -> TrustedKeys {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut out: Vec<(String, String)> = files
            .filter(|path| path.extension().is_some_and(|e| e == "pub"))
            .filter_map(|path| {
                let key = parse_public(&text(&path).ok()??)?;
                Some((path.file_stem()?.to_string_lossy().into_owned(), key.to_base64()))
            })
            .collect();
        out.sort();
        TrustedKeys(out)
    }

    /// Returns the name of a key.
    pub fn name(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(_, known)| known == key).map(|(name, _)| name.as_str())
    }
}

/// Checks the signature of a bundle, if there is one: by `key`, else by the key that the signature names.
///
/// # Errors
/// The signature is malformed, is not of this file, or is not of `key`; or there is none although a key is given.
pub fn verify(bundle: &Path, key: Option<&PublicKey>, trusted: &TrustedKeys) -> Result<Option<Signer>> {
    let path = signature_path(bundle);
    let shown = path.display();
    let Some(text) = text(&path)? else {
        return match key {
            None => Ok(None),
            Some(_) => Err(Error::Refused(format!("{}: there is no signature {shown}", bundle.display()))),
        };
    };
    let refused = |rule: String| Error::Refused(format!("{shown}: {rule}"));
    let signature = parse_signature(&text).ok_or_else(|| refused("is no signature of minisign".into()))?;
    let comment = signature.untrusted_comment().unwrap_or_default();
    let stated = comment.split(' ').next_back().and_then(key_of);
    let known = trusted.0.iter().filter_map(|(_, key)| key_of(key));
    let id = signature.keynum();
    let stated = stated.into_iter().chain(known).find(|key| key.keynum() == id);
    let by = match key {
        Some(key) => key.clone(),
        None => stated.ok_or_else(|| {
            refused("is by a key that it does not contain\n  hint: --key KEY names the public key of its author".into())
        })?,
    };
    let file = File::open(bundle).map_err(io("read", bundle))?;
    minisign::verify(&by, &signature, file, true, false, false).map_err(|e| match id == by.keynum() {
        true => refused(format!("is not the signature of {}: {e}", bundle.display())),
        false => refused(format!("is by another key than {}: {e}", by.to_base64())),
    })?;
    let key = by.to_base64();
    Ok(Some(Signer { name: trusted.name(&key).map(String::from), key }))
}

/// Parses a signature: two comments, each with a line in base 64 behind it. The library takes any lengths of these, and panics on
/// wrong ones when it verifies.
fn parse_signature(text: &str) -> Option<SignatureBox> {
    let lines: Vec<&str> = text.lines().collect();
    let [untrusted, signature, trusted, global] = lines[..] else { return None };
    let comments = untrusted.starts_with("untrusted comment: ") && trusted.starts_with("trusted comment: ");
    // Algorithm (2 bytes), key number (8) and signature (64); and the signature of the signature and the trusted comment.
    let lengths = is_base64(signature, 74) && is_base64(global, 64);
    (comments && lengths).then(|| SignatureBox::from_string(text).ok()).flatten()
}

/// Whether a text is base 64 of so many bytes.
fn is_base64(text: &str, bytes: usize) -> bool {
    let digits = (4 * bytes).div_ceil(3);
    let (body, padding) = text.split_at_checked(digits).unwrap_or(("", text));
    let plain = |c: u8| c.is_ascii_alphanumeric() || c == b'+' || c == b'/';
    text.len() == bytes.div_ceil(3) * 4 && body.bytes().all(plain) && padding.bytes().all(|c| c == b'=')
}
