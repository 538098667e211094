//! Decides which clients are accepted, by the names in their certificates. The administrator's CA may sign certificates for every program in
//! the cluster, so its signature is not enough.

use rustls::pki_types::CertificateDer;
use webpki::EndEntityCert;

use super::certificate;

/// The name in the certificate that the extender makes for kube-scheduler.
pub const KUBE_SCHEDULER: &str = "kube-scheduler";
/// The maximum number of characters of a certificate's names that a message repeats.
const LONGEST: usize = 200;

/// Why a client's certificate is not accepted. Each text is a sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotAccepted {
    /// The certificate cannot be parsed.
    #[error("its certificate cannot be read ({0})")]
    Unreadable(webpki::Error),
    /// None of the certificate's names is accepted.
    #[error(
        "its certificate has {shown}, but this extender only answers {accepted}; if the client is kube-scheduler, start the extender with \
         --client-name and the name in the certificate (Helm: extender.tls.clientNames)"
    )]
    OtherNames {
        /// The certificate's names, shortened.
        shown: String,
        /// The accepted names.
        accepted: String,
    },
}

/// The names of accepted clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientNames(Vec<String>);

impl ClientNames {
    /// Make the list: the given names, or [`KUBE_SCHEDULER`] if none is given, and the extender's own name, because a replica
    /// presents its own certificate to the leader.
    pub fn new(given: &[String], server_name: &str) -> ClientNames {
        let mut names = given.to_vec();
        if names.is_empty() {
            names.push(KUBE_SCHEDULER.to_owned());
        }
        names.push(server_name.to_owned());
        ClientNames(names)
    }

    /// Check that one of the certificate's names equals an accepted name. Its names are the common name, and the DNS names and
    /// URIs among the alternative names. Signature and validity are checked elsewhere.
    pub fn check(&self, certificate: &CertificateDer<'_>) -> Result<(), NotAccepted> {
        let found = names_of(certificate).map_err(NotAccepted::Unreadable)?;
        if found.iter().any(|name| self.0.contains(name)) {
            return Ok(());
        }
        let mut shown = if found.is_empty() {
            "no name".to_owned()
        } else {
            found.iter().map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ")
        };
        if let Some((cut, _)) = shown.char_indices().nth(LONGEST) {
            shown.truncate(cut);
            shown.push('…');
        }
        Err(NotAccepted::OtherNames {
            shown,
            accepted: self.0.join(" and "),
        })
    }
}

/// Return the names in a certificate: the common name, then the DNS names and URIs among the alternative names.
fn names_of(certificate: &CertificateDer<'_>) -> Result<Vec<String>, webpki::Error> {
    let read = EndEntityCert::try_from(certificate)?;
    let mut names: Vec<String> = certificate::common_name(read.subject()).into_iter().collect();
    names.extend(read.valid_dns_names().chain(read.valid_uri_names()).map(str::to_owned));
    names.dedup();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn certificate(common_name: Option<&str>, alternatives: &[SanType]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "kube-scheduler");
        if let Some(name) = common_name {
            params.distinguished_name.push(DnType::CommonName, name);
        }
        params.subject_alt_names = alternatives.to_vec();
        let key = KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("a certificate").der().clone()
    }

    fn dns(name: &str) -> SanType {
        SanType::DnsName(name.try_into().expect("ASCII"))
    }

    #[test]
    fn a_client_is_let_in_by_one_of_its_names_and_by_nothing_else() {
        let names = ClientNames::new(&[], "divvy-extender.divvy-system.svc");
        let uri = SanType::URI("kube-scheduler".try_into().expect("ASCII"));
        let of_mail = SanType::Rfc822Name("kube-scheduler".try_into().expect("ASCII"));
        for (what, certificate, expected) in [
            ("the common name", certificate(Some("kube-scheduler"), &[]), true),
            (
                "one of two DNS names",
                certificate(None, &[dns("a"), dns("kube-scheduler")]),
                true,
            ),
            (
                "a replica's",
                certificate(Some("divvy-extender"), &[dns("divvy-extender.divvy-system.svc")]),
                true,
            ),
            ("a URI", certificate(None, &[uri]), true),
            (
                "another name",
                certificate(Some("webshop.tenant-a.svc"), &[dns("webshop.tenant-a.svc")]),
                false,
            ),
            ("no name but an organisation's", certificate(None, &[]), false),
            (
                "one that only begins like it",
                certificate(Some("kube-scheduler.tenant-a"), &[]),
                false,
            ),
            ("other letters", certificate(Some("Kube-Scheduler"), &[]), false),
            ("a wildcard", certificate(None, &[dns("*.divvy-system.svc")]), false),
            ("an address of mail", certificate(None, &[of_mail]), false),
        ] {
            assert_eq!(names.check(&certificate).is_ok(), expected, "{what}");
        }
    }

    /// The names of the replicas stay.
    #[test]
    fn given_names_replace_only_the_schedulers_names() {
        let names = ClientNames::new(&["system:kube-scheduler".to_owned()], "x.svc");
        assert_eq!(names.check(&certificate(Some("system:kube-scheduler"), &[])), Ok(()));
        assert_eq!(names.check(&certificate(None, &[dns("x.svc")])), Ok(()));
        let why = names
            .check(&certificate(Some("kube-scheduler"), &[]))
            .expect_err("not one of them")
            .to_string();
        assert!(
            why.contains("\"kube-scheduler\"")
                && why.contains("system:kube-scheduler and x.svc")
                && why.contains("--client-name"),
            "{why}"
        );
    }

    /// The message repeats at most one line of the certificate, and no control characters.
    #[test]
    fn a_message_repeats_little_of_a_certificate() {
        let names = ClientNames::new(&[], "x.svc");
        let why = names
            .check(&certificate(Some(&format!("\u{1b}[31m{}", "a".repeat(5_000))), &[]))
            .expect_err("refused")
            .to_string();
        assert!(why.len() < 600 && !why.contains('\u{1b}'), "{why}");
        assert!(
            names
                .check(&CertificateDer::from(vec![1, 2, 3]))
                .is_err_and(|why| matches!(why, NotAccepted::Unreadable(_)))
        );
    }
}
