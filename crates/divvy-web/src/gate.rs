//! Which clients may see the pages.

use std::fmt;

use futures::future::BoxFuture;
use subtle::ConstantTimeEq as _;

/// Decides by a token who may see the pages.
pub trait Gate: Send + Sync + 'static {
    /// Check a token. It is not empty, and its size is limited.
    fn check<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<(), TokenRefusal>>;

    /// Return sentences that say how to get a token, for the page of a client without one.
    fn how(&self) -> &str;
}

/// Why a token does not open the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenRefusal {
    /// The token is wrong, or has expired.
    Unknown,
    /// The token is right, but its user may not see the pages.
    Forbidden {
        /// The right that is missing: `list pods in all namespaces`.
        right: String,
    },
    /// The token could not be checked.
    Unavailable {
        /// The reason, as a sentence.
        why: String,
    },
}

/// The gate of `divvy web`: one random token, which the program shows to the user who started it.
pub struct LocalToken(String);

impl fmt::Debug for LocalToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LocalToken(…)")
    }
}

impl LocalToken {
    /// Make a new token of 256 random bits.
    ///
    /// # Errors
    /// The operating system gave no random bytes.
    pub fn random() -> std::io::Result<LocalToken> {
        let mut bytes = [0_u8; 32];
        getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
        Ok(LocalToken(bytes.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Return the token, for the address that is shown to the user.
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl Gate for LocalToken {
    fn check<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<(), TokenRefusal>> {
        let same = bool::from(self.0.as_bytes().ct_eq(token.as_bytes()));
        Box::pin(std::future::ready(if same { Ok(()) } else { Err(TokenRefusal::Unknown) }))
    }

    fn how(&self) -> &str {
        "Open the address that `divvy web` printed when it was started: it contains the token. The token changes with each start."
    }
}
