//! What kube-scheduler must be told so that it asks Divvy's extender, as text: the configuration itself, an existing one
//! with ours in it ([`merge`]), where it goes on which distribution ([`distribution`]), a second scheduler for control
//! planes that cannot be changed ([`second`]), and the proof that it works ([`check`]).
//!
//! Facts are from kube-scheduler 1.36 (`pkg/scheduler/extender.go`, `apis/config/validation`, `cmd/kube-scheduler/app/options`).

pub mod check;
mod convert;
pub mod distribution;
pub mod installed;
pub mod merge;
pub mod second;

use serde_json::Value;

/// The only version that Kubernetes 1.29 and later read; 1.25 is the first that does.
pub const API_VERSION: &str = "kubescheduler.config.k8s.io/v1";
/// `kind` of the configuration.
pub const KIND: &str = "KubeSchedulerConfiguration";
/// Where the extender is for a scheduler on the same control plane node: the port is gpushare's.
pub const LOCAL_URL: &str = "http://127.0.0.1:32766/gpushare-scheduler";
/// Where the extender is for a scheduler that runs as an ordinary pod.
pub const SERVICE_URL: &str = "http://divvy-extender.divvy-system.svc:32766/gpushare-scheduler";
/// The path under which the extender answers.
const PATH: &str = "/gpushare-scheduler";
/// The scheduler that pods have unless they name another.
pub const DEFAULT_PROFILE: &str = "default-scheduler";
/// kube-scheduler's own default. The extender answers within 4.5 s whatever happens ([`divvy_extender::Timing`]).
const HTTP_TIMEOUT_SECONDS: u64 = 5;

pub use divvy_extender::admission::MANAGED;
use divvy_model::scores::WEIGHT;

/// What cannot be done with what was given. Every text says what was found, why it matters, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address of the extender is none.
    #[error("--extender-url {url}: {why}; write for example {LOCAL_URL}")]
    Url {
        /// What was given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// Flags about TLS that do not go together.
    #[error("{0}")]
    Tls(String),
    /// The file is not YAML.
    #[error(
        "{origin} is not YAML that kube-scheduler could read: {text}\nMend that line and run the command again; nothing was written."
    )]
    NotYaml {
        /// The file.
        origin: String,
        /// The parser's words, with line and column.
        text: String,
    },
    /// The file is something else.
    #[error("{origin} is {found}, not a {KIND}; {instead}. Nothing was written.")]
    OtherKind {
        /// The file.
        origin: String,
        /// What it is.
        found: String,
        /// Which file is meant.
        instead: String,
    },
    /// Something in it has no equal in v1, and leaving it out would change where pods go.
    #[error("{origin}: {path} is {found}, which {API_VERSION} does not have: {why}. {instead} Nothing was written.")]
    NotInV1 {
        /// The file.
        origin: String,
        /// Where in it.
        path: String,
        /// What is there.
        found: String,
        /// Since when, and why it cannot be left out.
        why: String,
        /// What to write instead.
        instead: String,
    },
    /// kube-scheduler would not start with both.
    #[error("{origin}: {path} {found}; {why}. {instead} Nothing was written.")]
    Conflict {
        /// The file.
        origin: String,
        /// Where in it.
        path: String,
        /// What is there.
        found: String,
        /// Why it cannot stay beside ours.
        why: String,
        /// What to do.
        instead: String,
    },
    /// No API server could call the extender so.
    #[error("{0}")]
    Webhook(String),
    /// That version has no policy.
    #[error(
        "Kubernetes {0} has no MutatingAdmissionPolicy that can be used (beta from 1.34 on, behind flags of the API server; on from 1.36); give \
         --mutate-with webhook, or none and write schedulerName into the pods"
    )]
    NoPolicy(second::Version),
    /// Not a version of Kubernetes.
    #[error("Kubernetes version {0:?} cannot be read; write for example 1.36.3")]
    Version(String),
}

/// Certificates in the file itself, as kube-scheduler takes them: base64 of PEM.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Inline {
    /// The certificate authority that signed the extender's certificate.
    pub ca: String,
    /// The scheduler's own certificate.
    pub cert: String,
    /// Its key.
    pub key: String,
}

impl std::fmt::Debug for Inline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not the key.
        f.debug_struct("Inline").finish_non_exhaustive()
    }
}

/// TLS between the scheduler and the extender; paths as the scheduler sees them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// Certificates in the file itself, instead of paths.
    pub inline: Option<Inline>,
    /// The certificate authority that signed the extender's certificate.
    pub ca: Option<String>,
    /// The scheduler's own certificate, for an extender that asks for one.
    pub cert: Option<String>,
    /// Its key.
    pub key: Option<String>,
    /// The name in the extender's certificate, where it is not the host of the address.
    pub server_name: Option<String>,
}

const INLINE_NOTE: &str =
    "  # With the scheduler's key in it this file is a secret: nobody but the scheduler may read it. Read at its start only.\n";

impl Tls {
    /// As `tlsConfig` names them.
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
    /// Of its scores.
    weight: i64,
}

impl Stanza {
    /// Checks the address and the flags about TLS.
    pub fn new(url: &str, tls: Tls) -> Result<Stanza, Error> {
        let wrong = |why: String| Error::Url {
            url: url.to_owned(),
            why,
        };
        let rest = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
            (Some(rest), _) | (_, Some(rest)) => rest,
            _ => return Err(wrong("it must begin with http:// or https://".to_owned())),
        };
        let url = url.trim_end_matches('/');
        let host = rest.split('/').next().unwrap_or_default();
        if host.is_empty() || host.starts_with(':') || url.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(wrong("there is no host in it".to_owned()));
        }
        if !url.ends_with(PATH) {
            return Err(wrong(format!("the extender answers under {PATH}, and this ends otherwise")));
        }
        if tls.cert.is_some() != tls.key.is_some() {
            return Err(Error::Tls(
                "--tls-cert and --tls-key go together: a certificate is of no use without its key".to_owned(),
            ));
        }
        if !url.starts_with("https://") && tls != Tls::default() {
            return Err(Error::Tls(format!(
                "--tls-… was given, and --extender-url {url} is plain HTTP: write https:// in it, or leave the --tls-… flags out"
            )));
        }
        Ok(Stanza {
            url: url.to_owned(),
            tls,
            weight: WEIGHT,
        })
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The name that the extender's certificate is asked for, where it is not the host of the address.
    pub fn server_name(&self) -> Option<&str> {
        self.tls.server_name.as_deref()
    }

    /// Whether the text has a private key in it.
    pub fn secret(&self) -> bool {
        self.https() && self.tls.inline.is_some()
    }

    /// Whether the address is https.
    pub fn https(&self) -> bool {
        self.url.starts_with("https://")
    }

    /// What is said of an address whose owner nobody checks.
    pub fn warning(&self) -> Option<String> {
        (self.https() && self.tls.ca.is_none() && self.tls.inline.is_none()).then(|| {
            "warning: https without --tls-ca: kube-scheduler then accepts any certificate, so whoever sits in between decides where GPU pods run"
                .to_owned()
        })
    }

    /// The same entry at the address, and with the TLS settings, of one that is there.
    fn at(&self, url: &str) -> Stanza {
        Stanza {
            url: url.to_owned(),
            tls: self.tls.clone(),
            weight: self.weight,
        }
    }

    /// An item of the list under `extenders:`, with the reasons.
    pub fn text(&self) -> String {
        let mut tls = String::new();
        if self.https() {
            tls.push_str("  enableHTTPS: true\n");
            let fields = self.tls.fields();
            if !fields.is_empty() {
                tls.push_str(match self.tls.inline {
                    Some(_) => INLINE_NOTE,
                    None => {
                        "  # Paths as the scheduler sees them: in its container, if it runs in one. Read at its start only.\n"
                    }
                });
                tls.push_str("  tlsConfig:\n");
            }
            for (name, value) in fields {
                tls.push_str(&format!("    {name}: {}\n", quoted(value)));
            }
        }
        let managed: String = MANAGED
            .iter()
            .map(|name| format!("  - name: {name}\n    ignoredByScheduler: false\n"))
            .collect();
        format!(
            "\
# Divvy. Every profile asks it about pods that want one of managedResources, and about no others.
- urlPrefix: {url}
  filterVerb: filter
  # Which of the nodes that fit is best. 25: the best stays the best whatever the scheduler's own scores are, which all together are 1,200 at most,
  # with the default weights of its plugins. With 11 what a pod itself prefers can win, with 1 the extender gives a hint.
  prioritizeVerb: prioritize
  weight: {weight}
  # Whom a pod of higher priority pushes out: on one GPU, not one here and one there.
  preemptVerb: preempt
  # The extender binds: the pod's GPU is written in the very request that binds it. Only one extender can have a bindVerb.
  bindVerb: bind
{tls}  # Longer than the extender takes at worst (4.5 s), so that no answer is lost.
  httpTimeout: {HTTP_TIMEOUT_SECONDS}s
  # Names of nodes are sent, not whole nodes: the extender watches the nodes itself.
  nodeCacheCapable: true
  # false: while the extender is away GPU pods wait. With true the scheduler would bind them without a GPU.
  ignorable: false
  # false: the scheduler counts each node's sum as well, so that preemption and the cluster autoscaler see what is missing.
  managedResources:
{managed}",
            url = quoted(&self.url),
            weight = self.weight,
        )
    }
}

/// A scheduler's whole configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whole<'a> {
    /// The extender.
    pub stanza: &'a Stanza,
    /// The kubeconfig that the scheduler itself uses; none: its pod's account.
    pub kubeconfig: Option<&'a str>,
    /// `schedulerName` of its profile.
    pub profile: &'a str,
    /// Name and namespace of the leader's lease, where it is not kube-scheduler's own.
    pub lease: Option<(&'a str, &'a str)>,
}

impl Whole<'_> {
    /// The file.
    pub fn text(&self) -> String {
        let client = match self.kubeconfig {
            Some(path) => format!(
                "\
clientConnection:
  # With --config kube-scheduler ignores --kubeconfig: without this line it looks for a pod's account and ends.
  kubeconfig: {}
",
                quoted(path)
            ),
            None => "# No clientConnection: the account of the scheduler's own pod.\n".to_owned(),
        };
        let lease = match self.lease {
            Some((name, namespace)) => format!(
                "  # Its own lease: with the name of the cluster's scheduler only one of the two would work.\n  \
                 resourceName: {}\n  resourceNamespace: {}\n",
                quoted(name),
                quoted(namespace)
            ),
            None => String::new(),
        };
        format!(
            "\
# For kube-scheduler --config, Kubernetes 1.25 and later. It is read at the scheduler's start only.
apiVersion: {API_VERSION}
kind: {KIND}
{client}\
leaderElection:
  # With several control planes one scheduler works and the others wait. The flags --leader-elect… win over this.
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
# All nodes are looked at. By default a scheduler of more than 100 nodes stops early, and the extender would refuse those it is
# asked about while a node with a free GPU was never named to it.
percentageOfNodesToScore: 100";

/// A string as YAML takes it whatever is in it: JSON is YAML.
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
        Whole {
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
        let answer = divvy_extender::Timing::default().answer_within_ns;
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
    fn certificates_stand_in_the_file_itself_when_they_come_from_the_cluster() {
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
        check("127.0.0.1:32766", &none, "must begin with http://");
        check("http://", &none, "no host");
        check("http://:32766/gpushare-scheduler", &none, "no host");
        check("http://a b/gpushare-scheduler", &none, "no host");
        check("http://127.0.0.1:32766", &none, "answers under /gpushare-scheduler");
        check("http://127.0.0.1:32766/gpushare-scheduler", &ca, "plain HTTP");
        check("https://127.0.0.1:32766/gpushare-scheduler", &cert, "go together");
        let https = Stanza::new("https://127.0.0.1:32766/gpushare-scheduler", none).expect("it is right");
        assert!(https.warning().is_some_and(|text| text.contains("any certificate")));
    }

    #[test]
    fn what_a_user_typed_cannot_break_out_of_its_line() {
        let stanza = stanza();
        let odd = "a\"b\n- c: #d";
        let text = Whole {
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
