//! The text of the configuration that makes kube-scheduler call Divvy's extender: a whole file, or an existing file with Divvy's
//! entry added ([`merge`]). Also the installation steps for each distribution ([`distribution`]), a second scheduler for control
//! planes that cannot be changed ([`second_scheduler`]), and the check that the scheduler calls the extender ([`check`]).
//!
//! The facts come from kube-scheduler 1.36 (`pkg/scheduler/extender.go`, `apis/config/validation`,
//! `cmd/kube-scheduler/app/options`).

pub mod check;
mod convert;
pub mod distribution;
pub mod installed;
pub mod merge;
pub mod second_scheduler;

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::Value;

/// The API version of the configuration. Kubernetes 1.25 and later read it. Kubernetes 1.29 and later read no other API version.
pub const API_VERSION: &str = "kubescheduler.config.k8s.io/v1";
/// The `kind` of the configuration.
pub const KIND: &str = "KubeSchedulerConfiguration";
/// The extender's address for a scheduler on the same control plane node. The port is gpushare's.
pub const LOCAL_URL: &str = "http://127.0.0.1:32766/gpushare-scheduler";
/// The extender's address for a scheduler that runs as an ordinary pod.
pub const SERVICE_URL: &str = "http://divvy-extender.divvy-system.svc:32766/gpushare-scheduler";
/// The URL path of the extender.
const PATH: &str = "/gpushare-scheduler";
/// The `schedulerName` of pods that do not set one.
pub const DEFAULT_PROFILE: &str = "default-scheduler";
/// The timeout of a call to the extender, which is kube-scheduler's default. The extender always answers within 4.5 s
/// ([`divvy_extender::Timing`]).
const HTTP_TIMEOUT_SECONDS: u64 = 5;

pub use divvy_extender::admission::{is_managed, managed};
use divvy_model::scores::WEIGHT;
use divvy_model::{MigProfile, WholeKind};

/// The reason why no configuration can be made. Every text says what was found, why it matters, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SchedulerConfigError {
    /// The extender's address is not valid.
    #[error("--extender-url {url}: {why}; write, for example, {LOCAL_URL}")]
    Url {
        /// The given address.
        url: String,
        /// The reason why the address is not valid.
        why: String,
    },
    /// TLS flags contradict each other.
    #[error("{0}")]
    Tls(String),
    /// The file is not YAML.
    #[error(
        "{origin} is not YAML that kube-scheduler could read: {text}\nCorrect that line and run the command again; nothing was written."
    )]
    NotYaml {
        /// The file's name.
        origin: String,
        /// The parser's error, with line and column.
        text: String,
    },
    /// The file is not a scheduler's configuration.
    #[error("{origin} is {found}, not a {KIND}; {instead}. Nothing was written.")]
    OtherKind {
        /// The file's name.
        origin: String,
        /// What the file contains.
        found: String,
        /// Which file to give instead.
        instead: String,
    },
    /// A field of the file has no equivalent in v1, and omitting it would change where pods go.
    #[error("{origin}: {path} is {found}, which {API_VERSION} does not have: {why}. {instead} Nothing was written.")]
    NotInV1 {
        /// The file's name.
        origin: String,
        /// The path of the field.
        path: String,
        /// The value of the field.
        found: String,
        /// The version that removed the field, and the reason why the field cannot be omitted.
        why: String,
        /// What to write instead.
        instead: String,
    },
    /// A field of the file conflicts with Divvy's entry: kube-scheduler would not start with both.
    #[error("{origin}: {path} {found}; {why}. {instead} Nothing was written.")]
    Conflict {
        /// The file's name.
        origin: String,
        /// The path of the field.
        path: String,
        /// The value of the field.
        found: String,
        /// Why the field conflicts with Divvy's entry.
        why: String,
        /// What to do.
        instead: String,
    },
    /// The API server could not call the extender at the address in the configuration.
    #[error("{0}")]
    Webhook(String),
    /// This Kubernetes version has no usable MutatingAdmissionPolicy.
    #[error(
        "Kubernetes {0} has no usable MutatingAdmissionPolicy (beta from 1.34 on, behind flags of the API server; enabled from 1.36 on); write \
         --mutate-with webhook, or --mutate-with none and set schedulerName in the pods"
    )]
    NoPolicy(second_scheduler::KubernetesVersion),
    /// The text is not a version of Kubernetes.
    #[error("{0:?} is not a version of Kubernetes; write, for example, 1.36.3")]
    Version(String),
}

impl SchedulerConfigError {
    /// Return what was found in the file, without what `divvy scheduler-config` tells its user to do.
    pub fn found(&self) -> String {
        match self {
            SchedulerConfigError::NotInV1 { path, found, why, .. } => {
                format!("{path} is {found}, which {API_VERSION} does not have: {why}")
            }
            SchedulerConfigError::Conflict { path, found, why, .. } => format!("{path} {found}; {why}"),
            other => other.to_string(),
        }
    }
}

/// Certificates that the configuration contains, as base64 of PEM.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Inline {
    /// The certificate authority that signed the extender's certificate.
    pub ca: String,
    /// The scheduler's own certificate.
    pub cert: String,
    /// The private key of the scheduler's certificate.
    pub key: String,
}

impl std::fmt::Debug for Inline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Do not print the key.
        f.debug_struct("Inline").finish_non_exhaustive()
    }
}

/// The settings for TLS between the scheduler and the extender. All paths are paths in the scheduler's file system.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// The certificates that the configuration itself contains, instead of paths.
    pub inline: Option<Inline>,
    /// The path of the certificate authority that signed the extender's certificate.
    pub ca: Option<String>,
    /// The path of the scheduler's own certificate, for an extender that requires one.
    pub cert: Option<String>,
    /// The path of the private key of `cert`.
    pub key: Option<String>,
    /// The name in the extender's certificate, if it differs from the host of the address.
    pub server_name: Option<String>,
}

const INLINE_NOTE: &str = "  # This file contains the scheduler's private key: only the scheduler may be able to read it. The scheduler reads it only when it starts.\n";

impl Tls {
    /// Return the settings, each with its name in `tlsConfig`.
    fn fields(&self) -> Vec<(&'static str, &String)> {
        let named = match &self.inline {
            Some(Inline { ca, cert, key }) => [("caData", Some(ca)), ("certData", Some(cert)), ("keyData", Some(key))],
            None => [
                ("caFile", self.ca.as_ref()),
                ("certFile", self.cert.as_ref()),
                ("keyFile", self.key.as_ref()),
            ],
        };
        named
            .into_iter()
            .chain([("serverName", self.server_name.as_ref())])
            .filter_map(|(name, value)| Some((name, value.filter(|value| !value.is_empty())?)))
            .collect()
    }
}

/// Divvy's entry under `extenders`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stanza {
    url: String,
    tls: Tls,
    /// The weight of the extender's scores.
    weight: i64,
    /// The profiles of the MIG devices that pods can have as a whole.
    mig_profiles: BTreeSet<MigProfile>,
}

impl Stanza {
    /// Make an entry, after checking the address and the TLS settings.
    pub fn new(url: &str, tls: Tls) -> Result<Stanza, SchedulerConfigError> {
        let wrong = |why: String| SchedulerConfigError::Url {
            url: url.to_owned(),
            why,
        };
        let rest = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
            (Some(rest), _) | (_, Some(rest)) => rest,
            _ => return Err(wrong("it must start with http:// or https://".to_owned())),
        };
        let url = url.trim_end_matches('/');
        let host = rest.split('/').next().unwrap_or_default();
        if host.is_empty() || host.starts_with(':') || url.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(wrong("it has no host".to_owned()));
        }
        if !url.ends_with(PATH) {
            return Err(wrong(format!("it does not end in {PATH}, the path of the extender")));
        }
        if tls.cert.is_some() != tls.key.is_some() {
            return Err(SchedulerConfigError::Tls(
                "--tls-cert and --tls-key go together: a certificate is useless without its private key; give both or none"
                    .to_owned(),
            ));
        }
        if !url.starts_with("https://") && tls != Tls::default() {
            return Err(SchedulerConfigError::Tls(format!(
                "the --tls-… flags need https, but --extender-url {url} is plain HTTP: write https:// in the address, or omit the --tls-… flags"
            )));
        }
        Ok(Stanza {
            url: url.to_owned(),
            tls,
            weight: WEIGHT,
            mig_profiles: BTreeSet::new(),
        })
    }

    /// Return the entry with the resources of MIG devices of these profiles as well.
    #[must_use]
    pub fn with_mig(mut self, profiles: impl IntoIterator<Item = MigProfile>) -> Stanza {
        self.mig_profiles.extend(profiles);
        self
    }

    /// Return the resources for which the scheduler calls the extender.
    fn resources(&self) -> impl Iterator<Item = Cow<'static, str>> {
        let mig = self.mig_profiles.iter().map(|profile| WholeKind::Mig(*profile).resource());
        managed().map(Cow::Borrowed).chain(mig)
    }

    /// Return the extender's address, without a trailing slash.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Return the name in the extender's certificate, if it differs from the host of the address.
    pub fn server_name(&self) -> Option<&str> {
        self.tls.server_name.as_deref()
    }

    /// Report whether the text contains a private key.
    pub fn secret(&self) -> bool {
        self.https() && self.tls.inline.is_some()
    }

    /// Report whether the address uses HTTPS.
    pub fn https(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// Return a warning if the scheduler would not verify the extender's certificate.
    pub fn warning(&self) -> Option<String> {
        (self.https() && self.tls.ca.is_none() && self.tls.inline.is_none()).then(|| {
            "warning: https without --tls-ca: kube-scheduler accepts any certificate, so an attacker on the network can decide where GPU pods run; add --tls-ca"
                .to_owned()
        })
    }

    /// Return this entry with another address.
    fn at(&self, url: &str) -> Stanza {
        Stanza {
            url: url.to_owned(),
            ..self.clone()
        }
    }

    /// Return the entry as an item of the YAML list `extenders:`, with comments that explain each field.
    pub fn text(&self) -> String {
        let mut tls = String::new();
        if self.https() {
            tls.push_str("  enableHTTPS: true\n");
            let fields = self.tls.fields();
            if !fields.is_empty() {
                tls.push_str(match self.tls.inline {
                    Some(_) => INLINE_NOTE,
                    None => {
                        "  # Paths that the scheduler sees, in its container if it runs in one. The scheduler reads these files only when it starts.\n"
                    }
                });
                tls.push_str("  tlsConfig:\n");
            }
            for (name, value) in fields {
                tls.push_str(&format!("    {name}: {}\n", quoted(value)));
            }
        }
        let managed: String = self
            .resources()
            .map(|name| format!("  - name: {name}\n    ignoredByScheduler: false\n"))
            .collect();
        format!(
            "\
# Divvy's extender. Every profile calls it only for pods that request one of managedResources.
- urlPrefix: {url}
  filterVerb: filter
  # The extender scores the nodes. With weight 25 its best node always wins, because the scheduler's own scores add up to at most 1,200
  # with the default weights of its plugins. With weight 11 a pod's own preferences can win, with weight 1 the extender only gives a hint.
  prioritizeVerb: prioritize
  weight: {weight}
  # The extender chooses which pods a pod of higher priority preempts: pods on one GPU, not on several.
  preemptVerb: preempt
  # The extender binds the pod: one request binds it and writes its GPU. Only one extender can have a bindVerb.
  bindVerb: bind
{tls}  # Longer than the extender's slowest answer (4.5 s), so that no answer is lost.
  httpTimeout: {HTTP_TIMEOUT_SECONDS}s
  # The scheduler sends only the names of nodes, because the extender watches the nodes itself.
  nodeCacheCapable: true
  # With false, GPU pods wait while the extender is unavailable. With true, the scheduler would bind them without a GPU.
  ignorable: false
  # With false, the scheduler also counts each node's sum, so that preemption and the cluster autoscaler see what is missing.
  managedResources:
{managed}",
            url = quoted(&self.url),
            weight = self.weight,
        )
    }
}

/// A complete configuration file for a scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WholeConfig<'a> {
    /// Divvy's entry.
    pub stanza: &'a Stanza,
    /// The path of the scheduler's kubeconfig. With `None`, the scheduler uses its pod's service account.
    pub kubeconfig: Option<&'a str>,
    /// The `schedulerName` of the only profile.
    pub profile: &'a str,
    /// The name and namespace of the lease, if they differ from kube-scheduler's defaults.
    pub lease: Option<(&'a str, &'a str)>,
}

impl WholeConfig<'_> {
    /// Return the configuration as YAML with comments.
    pub fn text(&self) -> String {
        let client = match self.kubeconfig {
            Some(path) => format!(
                "\
clientConnection:
  # With --config, kube-scheduler ignores --kubeconfig. Without this line it looks for a pod's service account, and exits.
  kubeconfig: {}
",
                quoted(path)
            ),
            None => "# No clientConnection: the scheduler uses the service account of its pod.\n".to_owned(),
        };
        let lease = match self.lease {
            Some((name, namespace)) => format!(
                "  # A separate lease: with the lease of the cluster's scheduler only one of the two would work.\n  \
                 resourceName: {}\n  resourceNamespace: {}\n",
                quoted(name),
                quoted(namespace)
            ),
            None => String::new(),
        };
        format!(
            "\
# For kube-scheduler --config, Kubernetes 1.25 and later. The scheduler reads this file only when it starts.
apiVersion: {API_VERSION}
kind: {KIND}
{client}\
leaderElection:
  # With several control plane nodes, one scheduler works and the others wait. The flags --leader-elect… override this.
  leaderElect: true
{lease}{PERCENTAGE}
profiles:
- schedulerName: {profile}
extenders:
{stanza}",
            profile = quoted(self.profile),
            stanza = self.stanza.text(),
        )
    }
}

const PERCENTAGE: &str = "\
# Check all nodes. By default, with more than 100 nodes, the scheduler stops at a part of them. The extender would then refuse the nodes
# that it receives, although another node has a free GPU.
percentageOfNodesToScore: 100";

/// Quote a string for YAML. A JSON string is also a YAML string, so any content is safe.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stanza() -> Stanza {
        Stanza::new(LOCAL_URL, Tls::default()).expect("the default is an address")
    }

    fn whole(stanza: &Stanza) -> String {
        WholeConfig {
            stanza,
            kubeconfig: Some("/etc/kubernetes/scheduler.conf"),
            profile: DEFAULT_PROFILE,
            lease: None,
        }
        .text()
    }

    #[test]
    fn the_configuration_is_this() {
        insta::assert_snapshot!(whole(&stanza()));
    }

    #[test]
    fn what_yaml_makes_of_it_is_what_the_design_demands() {
        let value: Value = serde_saphyr::from_str(&whole(&stanza())).expect("it is YAML");
        let extender = &value["extenders"][0];
        assert_eq!(value["apiVersion"], API_VERSION);
        assert_eq!(value["percentageOfNodesToScore"], 100);
        assert_eq!(extender["ignorable"], false);
        assert_eq!(extender["nodeCacheCapable"], true);
        assert_eq!(extender["managedResources"][0]["name"], "aliyun.com/gpu-mem");
        assert_eq!(extender["managedResources"][0]["ignoredByScheduler"], false);
        assert_eq!(
            (&extender["prioritizeVerb"], &extender["weight"]),
            (&"prioritize".into(), &25.into())
        );
    }

    #[test]
    fn the_scheduler_waits_longer_than_the_extender_takes() {
        let answer = divvy_extender::CoreTiming::default().answer_within_ns;
        assert!(HTTP_TIMEOUT_SECONDS * 1_000_000_000 > answer);
    }

    #[test]
    fn tls_is_written_when_it_is_asked_for() {
        let tls = Tls {
            ca: Some("/etc/divvy/ca.crt".to_owned()),
            cert: Some("/etc/divvy/tls.crt".to_owned()),
            key: Some("/etc/divvy/tls.key".to_owned()),
            server_name: Some("divvy-extender".to_owned()),
            inline: None,
        };
        let stanza = Stanza::new("https://10.0.0.7:32766/gpushare-scheduler/", tls).expect("it is right");
        assert_eq!(stanza.warning(), None);
        let value: Value = serde_saphyr::from_str(&whole(&stanza)).expect("it is YAML");
        assert_eq!(value["extenders"][0]["enableHTTPS"], true);
        assert_eq!(
            value["extenders"][0]["tlsConfig"],
            serde_json::json!({"caFile": "/etc/divvy/ca.crt", "certFile": "/etc/divvy/tls.crt", "keyFile": "/etc/divvy/tls.key", "serverName": "divvy-extender"})
        );
    }

    #[test]
    fn certificates_from_the_cluster_stand_in_the_file_itself() {
        let tls = Tls {
            inline: Some(Inline {
                ca: "Y2E=".to_owned(),
                cert: "Y3J0".to_owned(),
                key: "a2V5".to_owned(),
            }),
            server_name: Some("divvy-extender.divvy-system.svc".to_owned()),
            ..Tls::default()
        };
        assert!(!format!("{tls:?}").contains("a2V5"), "a key is not shown by accident");
        let stanza = Stanza::new("https://10.0.0.7:32766/gpushare-scheduler", tls).expect("it is right");
        assert!(stanza.secret());
        assert_eq!(stanza.warning(), None);
        let value: Value = serde_saphyr::from_str(&whole(&stanza)).expect("it is YAML");
        assert_eq!(
            value["extenders"][0]["tlsConfig"],
            serde_json::json!({"caData": "Y2E=", "certData": "Y3J0", "keyData": "a2V5", "serverName": "divvy-extender.divvy-system.svc"})
        );
    }

    #[test]
    fn a_wrong_address_is_refused_in_words() {
        let ca = Tls {
            ca: Some("/ca".to_owned()),
            ..Tls::default()
        };
        let cert = Tls {
            cert: Some("/cert".to_owned()),
            ..Tls::default()
        };
        let check = |url: &str, tls: &Tls, part: &str| {
            let error = Stanza::new(url, tls.clone()).expect_err(url).to_string();
            assert!(error.contains(part), "{url}: {error}");
        };
        let none = Tls::default();
        check("127.0.0.1:32766", &none, "must start with http://");
        check("http://", &none, "no host");
        check("http://:32766/gpushare-scheduler", &none, "no host");
        check("http://a b/gpushare-scheduler", &none, "no host");
        check("http://127.0.0.1:32766", &none, "does not end in /gpushare-scheduler");
        check("http://127.0.0.1:32766/gpushare-scheduler", &ca, "plain HTTP");
        check("https://127.0.0.1:32766/gpushare-scheduler", &cert, "go together");
        let https = Stanza::new("https://127.0.0.1:32766/gpushare-scheduler", none).expect("it is right");
        assert!(https.warning().is_some_and(|text| text.contains("any certificate")));
    }

    #[test]
    fn what_a_user_typed_cannot_break_out_of_its_line() {
        let stanza = stanza();
        let odd = "a\"b\n- c: #d";
        let text = WholeConfig {
            stanza: &stanza,
            kubeconfig: Some(odd),
            profile: odd,
            lease: Some((odd, odd)),
        }
        .text();
        let value: Value = serde_saphyr::from_str(&text).expect("it is YAML");
        assert_eq!(value["clientConnection"]["kubeconfig"], odd);
        assert_eq!(value["profiles"][0]["schedulerName"], odd);
        assert_eq!(value["leaderElection"]["resourceName"], odd);
    }
}
