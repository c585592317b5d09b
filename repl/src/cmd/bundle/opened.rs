//! Opens a bundle for a command: verifies it, and says who signed it.

use crate::config_folder::config_folder;
use crate::failure::Failure;
use perilune_bundle::sign::{Signer, TrustedKeys};
use perilune_bundle::{Bundle, sign};
use std::path::Path;

/// A verified bundle and the key of its signature.
pub struct Opened {
    pub bundle: Bundle,
    pub signer: Option<Signer>,
}

/// Verifies a bundle and its signature, if it has one.
pub fn open(path: &Path) -> Result<Opened, Failure> {
    let bundle = Bundle::open(path)?;
    let signer = sign::verify(path, None, &trusted_keys())?;
    Ok(Opened { bundle, signer })
}

/// Returns the keys in the person's configuration, `perilune/keys/NAME.pub`.
pub fn trusted_keys() -> TrustedKeys {
    config_folder().map(|dir| TrustedKeys::read(&dir.join("keys"))).unwrap_or_default()
}

/// Describes who signed.
pub fn signed(signer: Option<&Signer>) -> String {
    match signer {
        None => "not signed".into(),
        Some(Signer { key, name: Some(name) }) => format!("signed by {name} ({key})"),
        Some(Signer { key, name: None }) => format!("signed by the key {key}, which is not among your trusted keys"),
    }
}

impl From<perilune_bundle::Error> for Failure {
    fn from(e: perilune_bundle::Error) -> Failure {
        use perilune_bundle::Error;
        match e {
            Error::Io { action, path, source } => {
                Failure::System(format!("cannot {action} {}: {}", path.display(), crate::failure::plain(&source)))
            }
            Error::Refused(text) => Failure::Refused(text),
            Error::Usage(text) => Failure::Usage(text),
        }
    }
}
