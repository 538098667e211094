//! What gives pods to the second scheduler, so that no manifest changes: a policy that the API server decides by itself, or, where it has none, a
//! webhook that the extender answers ([`divvy_extender::admission`]). Both by the same conditions.

use divvy_extender::admission::{DEFAULT_SCHEDULER, check_scheduler_name, path};

use super::super::{Error, MANAGED};
use super::Version;

/// What gives pods to it, as it is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MutateWith {
    /// A MutatingAdmissionPolicy: from Kubernetes 1.36 on, in 1.34 and 1.35 behind flags of the API server
    Policy,
    /// A MutatingWebhookConfiguration: the API server asks the extender, over TLS; on any version
    Webhook,
    /// Nothing: schedulerName is written into the pods
    None,
}

impl MutateWith {
    /// What needs nothing that a closed control plane does not have.
    pub fn of(version: Version) -> MutateWith {
        if version.minor >= POLICY_GA {
            MutateWith::Policy
        } else {
            MutateWith::Webhook
        }
    }
}

/// MutatingAdmissionPolicy (KEP-3962): beta, and off.
const POLICY_BETA: u32 = 34;
const POLICY_GA: u32 = 36;
/// `matchConditions` of webhooks (KEP-3716): beta, and on; they cannot be switched off from 1.30 on.
const CONDITIONS: u32 = 28;

/// What gives pods to it, with what it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mutation {
    /// [`MutateWith::Policy`]
    Policy,
    /// [`MutateWith::Webhook`]
    Webhook(Webhook),
    /// [`MutateWith::None`]
    None,
}

/// The extender, as the API server reaches it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Webhook {
    namespace: String,
    service: String,
    port: u16,
    ca: String,
}

impl Webhook {
    /// The extender at this address, with a certificate that this authority (base64 of PEM) has signed. The API server asks it for the name of its
    /// Service and for no other; `server_name`: what kube-scheduler is told to ask for.
    pub fn new(url: &str, server_name: Option<&str>, ca: &str) -> Result<Webhook, Error> {
        let wrong = |why: String| {
            Error::Webhook(format!(
                "{why}. Take the extender that the chart installs, with TLS and a Service, by --from-cluster; where its certificates are in a \
                 Secret of yours, give --extender-url https://NAME.NAMESPACE.svc:32766/gpushare-scheduler and --tls-secret; or leave the webhook \
                 out: --mutate-with none"
            ))
        };
        let rest = url.strip_prefix("https://").ok_or_else(|| {
            wrong(format!(
                "the API server calls webhooks over TLS only, and the extender at {url} speaks plain HTTP"
            ))
        })?;
        let authority = rest.split('/').next().unwrap_or_default();
        let (host, port) = authority.rsplit_once(':').unwrap_or((authority, "443"));
        let port: u16 = port
            .parse()
            .map_err(|_| wrong(format!("{url} has no port that could be read")))?;
        let parts: Vec<&str> = host.split('.').collect();
        let [service, namespace, "svc", ..] = parts[..] else {
            return Err(wrong(format!(
                "the API server reaches a webhook by a Service, and the host of {url} is not NAME.NAMESPACE.svc"
            )));
        };
        let expected = format!("{service}.{namespace}.svc");
        if let Some(other) = server_name.filter(|name| *name != expected) {
            return Err(wrong(format!(
                "the API server asks a webhook's certificate for the name {expected}, and --tls-server-name says that it has {other}"
            )));
        }
        Ok(Webhook {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            port,
            ca: ca.to_owned(),
        })
    }
}

impl Mutation {
    /// The manifests; `{name}` is left in for the scheduler's name.
    pub(super) fn text(&self, version: Version, name: &str) -> Result<String, Error> {
        match self {
            Mutation::Policy => policy(version),
            Mutation::Webhook(webhook) => {
                check_scheduler_name(name).map_err(|why| Error::Webhook(format!("--profile {why}")))?;
                Ok(webhook.text(version, name))
            }
            Mutation::None => Ok(format!(
                "# Nothing gives pods to it (--mutate-with none): write  schedulerName: {{name}}  into the pods (or their templates) that want {}.\n",
                MANAGED.join(" or ")
            )),
        }
    }
}

fn policy(version: Version) -> Result<String, Error> {
    let (api, remark) = match version.minor {
        POLICY_GA.. => ("v1", String::new()),
        POLICY_BETA.. => (
            "v1beta1",
            format!(
                "# On Kubernetes {version} this is beta and off: the API server needs\n#   --feature-gates=MutatingAdmissionPolicy=true \
                 --runtime-config=admissionregistration.k8s.io/v1beta1=true\n# Where that cannot be set, kubectl says 'no matches for kind': there \
                 --mutate-with webhook does the same.\n",
            ),
        ),
        _ => return Err(Error::NoPolicy(version)),
    };
    Ok(POLICY
        .replace("{remark}", &remark)
        .replace("{api}", api)
        .replace("{conditions}", &conditions("  ")))
}

impl Webhook {
    fn text(&self, version: Version, name: &str) -> String {
        let why = match version.minor {
            POLICY_GA.. => {
                "Chosen by --mutate-with: a MutatingAdmissionPolicy does the same on this version, and needs no call.".to_owned()
            }
            POLICY_BETA.. => format!(
                "A webhook, as MutatingAdmissionPolicy is beta on Kubernetes {version}, and off: it needs flags of the API server, which a closed \
                 control plane\n# does not have. Where they are set: --mutate-with policy."
            ),
            _ => format!("A webhook, as Kubernetes {version} has no MutatingAdmissionPolicy that can be used."),
        };
        let conditions = match version.minor {
            CONDITIONS.. => format!(
                "  # The extender is asked about these pods only, and decides by the same rule.{}\n{}",
                match version.minor {
                    30.. => "",
                    _ => " Beta on this version, and on unless it was switched off.",
                },
                conditions("  ")
            ),
            _ => format!(
                "  # No matchConditions on Kubernetes {version} (from 1.28 on they are there): the extender is asked about every new pod, and decides.\n"
            ),
        };
        WEBHOOK
            .replace("{why}", &why)
            .replace("{conditions}", &conditions)
            .replace("{path}", &path(name))
            .replace("{ca}", &self.ca)
            .replace("{service}", &self.service)
            .replace("{service_ns}", &self.namespace)
            .replace("{port}", &self.port.to_string())
    }
}

/// Name and CEL expression of each condition: the rule of [`divvy_extender::admission`].
fn rules() -> [(&'static str, String); 3] {
    let wants: Vec<String> = MANAGED.iter().map(|name| format!("'{name}' in m")).collect();
    [
        (
            "names-no-scheduler",
            format!("!has(object.spec.schedulerName) || object.spec.schedulerName in ['', '{DEFAULT_SCHEDULER}']"),
        ),
        (
            "not-bound-already",
            "!has(object.spec.nodeName) || object.spec.nodeName == ''".to_owned(),
        ),
        (
            "wants-a-gpu",
            format!(
                "(object.spec.containers + (has(object.spec.initContainers) ? object.spec.initContainers : [])).exists(c, has(c.resources) &&\n\
                 ((has(c.resources.limits) ? [c.resources.limits] : []) + (has(c.resources.requests) ? [c.resources.requests] : [])).exists(m,\n\
                 {}))",
                wants.join(" || ")
            ),
        ),
    ]
}

fn conditions(indent: &str) -> String {
    let items = rules().map(|(name, expression)| {
        let lines: String = expression.lines().map(|line| format!("{indent}    {line}\n")).collect();
        format!("{indent}- name: {name}\n{indent}  expression: >-\n{lines}")
    });
    format!("{indent}matchConditions:\n{}", items.concat())
}

const POLICY: &str = "\
# Pods that want GPU memory and name no scheduler get this one, so that no manifest changes.
{remark}apiVersion: admissionregistration.k8s.io/{api}
kind: MutatingAdmissionPolicy
metadata:
  name: {name}
spec:
  # Fail: a pod that slipped through would be bound by the cluster's own scheduler, without a GPU.
  failurePolicy: Fail
  # Again when another one has changed the pod.
  reinvocationPolicy: IfNeeded
  matchConstraints:
    resourceRules:
    - apiGroups: [\"\"]
      apiVersions: [v1]
      operations: [CREATE]
      resources: [pods]
{conditions}  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration:
      expression: \"Object{spec: Object.spec{schedulerName: '{name}'}}\"
---
apiVersion: admissionregistration.k8s.io/{api}
kind: MutatingAdmissionPolicyBinding
metadata:
  name: {name}
spec:
  policyName: {name}
";

const WEBHOOK: &str = "\
# Pods that want GPU memory and name no scheduler get this one, so that no manifest changes: the API server asks the extender.
# {why}
# The extender answers it only when it is started with --webhook (Helm: extender.webhook=true).
# The control plane must reach port {port} of the extender's pods: some clouds need a firewall rule for that, and a network of pods that only nodes
# know is not reached at all (then the extender's metrics have no request of verb mutate; write  schedulerName: {name}  into the pods instead).
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata:
  name: {name}
webhooks:
- name: {name}.divvy.dev
  admissionReviewVersions: [v1]
  clientConfig:
    service:
      namespace: {service_ns}
      name: {service}
      port: {port}
      path: {path}
    # The extender's authority, which lives for ten years. If its Secret is made anew, this must be, too.
    caBundle: {ca}
  # Ignore: no pod waits for an extender that is away. One that slips through is bound by the cluster's own scheduler without a GPU, and does not
  # start: divvy why POD says so, and its owner makes it again when it is deleted.
  failurePolicy: Ignore
  # Decided in less than a millisecond: what takes longer does not come.
  timeoutSeconds: 3
  sideEffects: None
  # Again when another one has changed the pod.
  reinvocationPolicy: IfNeeded
  rules:
  - apiGroups: [\"\"]
    apiVersions: [v1]
    operations: [CREATE]
    resources: [pods]
    scope: Namespaced
  # What a cluster needs to come up does not ask. A pod of kube-system that wants a GPU has to name its scheduler.
  namespaceSelector:
    matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system]}
{conditions}";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const URL: &str = "https://divvy-extender.divvy-system.svc:32766/gpushare-scheduler";

    fn version(text: &str) -> Version {
        text.parse().expect("a version")
    }

    fn webhook() -> Mutation {
        Mutation::Webhook(Webhook::new(URL, None, "Y2E=").expect("an address"))
    }

    fn text(mutation: &Mutation, on: &str) -> String {
        let text = mutation.text(version(on), "divvy-scheduler").expect("it can be printed");
        text.replace("{name}", "divvy-scheduler")
    }

    fn first(text: &str) -> Value {
        serde_saphyr::from_str(text.split("\n---\n").next().unwrap_or_default()).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    #[test]
    fn each_version_has_what_needs_no_flag_of_the_api_server() {
        let check = |on: &str, expected: MutateWith| assert_eq!(MutateWith::of(version(on)), expected, "{on}");
        check("1.37.0", MutateWith::Policy);
        check("v1.36.3", MutateWith::Policy);
        check("1.35.1", MutateWith::Webhook);
        check("v1.34.2-eks-113cf36", MutateWith::Webhook);
        check("v1.33.4-gke.1134000", MutateWith::Webhook);
        check("1.29.0", MutateWith::Webhook);
    }

    #[test]
    fn a_policy_is_of_the_clusters_version_or_is_refused() {
        let check = |on: &str, expected: &str| {
            let policy = first(&text(&Mutation::Policy, on));
            assert_eq!(
                policy["apiVersion"],
                format!("admissionregistration.k8s.io/{expected}"),
                "{on}"
            );
            assert_eq!(policy["kind"], "MutatingAdmissionPolicy");
        };
        check("1.36.3", "v1");
        check("1.35.1", "v1beta1");
        check("1.34.0", "v1beta1");
        let why = Mutation::Policy
            .text(version("1.33.4"), "divvy-scheduler")
            .expect_err("too old")
            .to_string();
        assert!(why.contains("v1.33.4") && why.contains("--mutate-with webhook"), "{why}");
    }

    #[test]
    fn a_webhook_is_asked_at_its_service_and_held_up_by_nothing() {
        let object = first(&text(&webhook(), "1.33.4"));
        let hook = &object["webhooks"][0];
        assert_eq!(
            hook["clientConfig"],
            json!({"service": {"namespace": "divvy-system", "name": "divvy-extender", "port": 32766, "path": "/mutate/divvy-scheduler"}, "caBundle": "Y2E="})
        );
        assert_eq!(hook["failurePolicy"], "Ignore");
        assert_eq!(hook["sideEffects"], "None");
        assert!(hook["timeoutSeconds"].as_u64().is_some_and(|seconds| seconds <= 3));
        let named = |on: &str| first(&text(&webhook(), on))["webhooks"][0].get("matchConditions").is_some();
        assert_eq!(["1.27.9", "1.28.0", "1.29.0", "1.36.3"].map(named), [false, true, true, true]);
    }

    #[test]
    fn a_webhook_that_no_api_server_could_call_is_refused_in_words() {
        let check = |url: &str, server_name: Option<&str>, part: &str| {
            let why = Webhook::new(url, server_name, "Y2E=").expect_err(url).to_string();
            assert!(why.contains(part) && why.contains("--from-cluster"), "{url}: {why}");
        };
        check(
            "http://divvy-extender.divvy-system.svc:32766/gpushare-scheduler",
            None,
            "plain HTTP",
        );
        check("https://10.96.0.7:32766/gpushare-scheduler", None, "not NAME.NAMESPACE.svc");
        check(
            "https://divvy-extender:32766/gpushare-scheduler",
            None,
            "not NAME.NAMESPACE.svc",
        );
        check("https://e.n.svc:x/gpushare-scheduler", None, "no port");
        check(
            URL,
            Some("other"),
            "asks a webhook's certificate for the name divvy-extender.divvy-system.svc",
        );
        for (url, port) in [
            ("https://e.n.svc.cluster.local:9/gpushare-scheduler", 9),
            ("https://e.n.svc/gpushare-scheduler", 443),
        ] {
            let found = Webhook::new(url, Some("e.n.svc"), "Y2E=").expect("an address");
            assert_eq!(
                (found.service.as_str(), found.namespace.as_str(), found.port),
                ("e", "n", port)
            );
        }
        let why = webhook()
            .text(version("1.33.4"), "my.scheduler")
            .expect_err("a dot")
            .to_string();
        assert!(why.contains("--profile \"my.scheduler\""), "{why}");
    }

    /// Each pod through the CEL that is printed, as the API server would, and through the extender.
    #[test]
    fn policy_and_webhook_and_extender_give_the_same_pods() {
        let mem = json!({"limits": {"aliyun.com/gpu-mem": "3"}});
        let resources = [
            mem.clone(),
            json!({"requests": {"aliyun.com/gpu-mem": "3"}}),
            json!({"limits": {"aliyun.com/gpu-count": "1"}}),
            json!({"requests": {"cpu": "1"}, "limits": {"aliyun.com/gpu-count": "1", "cpu": "1"}}),
            json!({"limits": {"nvidia.com/gpu": "1"}}),
            json!({"limits": {"aliyun.com/gpu-mem-2": "1"}, "requests": {"cpu": "1"}}),
            json!({}),
        ];
        let main = json!({"name": "main", "image": "x"});
        let mut pods = Vec::new();
        for resources in &resources {
            let asking = json!({"name": "asks", "resources": resources});
            for name in [
                None,
                Some(""),
                Some("default-scheduler"),
                Some("divvy-scheduler"),
                Some("mine"),
            ] {
                for node in [None, Some(""), Some("n1")] {
                    for containers in [
                        json!({"containers": [asking]}),
                        json!({"containers": [main, asking]}),
                        json!({"containers": [main], "initContainers": [main, asking]}),
                    ] {
                        let mut spec = containers;
                        if let Some(name) = name {
                            spec["schedulerName"] = json!(name);
                        }
                        if let Some(node) = node {
                            spec["nodeName"] = json!(node);
                        }
                        pods.push(json!({"spec": spec}));
                    }
                }
            }
        }
        for (mutation, pointer) in [
            (Mutation::Policy, "/spec/matchConditions"),
            (webhook(), "/webhooks/0/matchConditions"),
        ] {
            let object = first(&text(&mutation, "1.36.3"));
            let printed = object.pointer(pointer).and_then(Value::as_array).expect("conditions");
            let programs: Vec<cel::Program> = printed
                .iter()
                .map(|condition| cel::Program::compile(condition["expression"].as_str().expect("text")).expect("CEL"))
                .collect();
            let mut given = 0;
            for pod in &pods {
                let mut context = cel::Context::default();
                context.add_variable("object", pod).expect("a value");
                let holds = |program: &cel::Program| match program.execute(&context) {
                    Ok(cel::Value::Bool(holds)) => holds,
                    other => panic!("{other:?}: {pod}"),
                };
                let by_conditions = programs.iter().all(holds);
                let review = json!({
                    "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                    "request": {"uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE", "object": pod}
                });
                let answer =
                    divvy_extender::admission::review(review.to_string().as_bytes(), "divvy-scheduler").expect("a review");
                assert_eq!(answer.gives(), by_conditions, "{pod}");
                given += usize::from(by_conditions);
            }
            assert!(given > 0 && given < pods.len(), "{given} of {}", pods.len());
        }
    }

    #[test]
    fn what_is_printed_for_each_version_is_this() {
        for (on, mutation) in [
            ("1.29.0", webhook()),
            ("1.33.4", webhook()),
            ("1.35.1", webhook()),
            ("1.35.1", Mutation::Policy),
            ("1.36.3", webhook()),
            ("1.36.3", Mutation::Policy),
        ] {
            let kind = match mutation {
                Mutation::Policy => "policy",
                _ => "webhook",
            };
            insta::assert_snapshot!(format!("{kind}_{}", on.replace('.', "_")), text(&mutation, on));
        }
    }
}
