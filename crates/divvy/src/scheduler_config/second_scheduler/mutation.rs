//! The object that assigns pods to the second scheduler, so users need not change the manifests of their pods. The object is a
//! policy that the API server evaluates itself, or, on versions without such policies, a webhook that the extender answers
//! ([`divvy_extender::admission`]). Both use the same conditions.

use divvy_extender::admission::{DEFAULT_SCHEDULER, check_scheduler_name, path};

use divvy_extender::admission::assigned;

use super::super::SchedulerConfigError;
use super::KubernetesVersion;

/// The value of `--mutate-with`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MutateWith {
    /// A MutatingAdmissionPolicy; Kubernetes 1.36 and later, 1.34 and 1.35 with flags of the API server
    Policy,
    /// A MutatingWebhookConfiguration: the API server calls the extender over TLS; any version of Kubernetes
    Webhook,
    /// Nothing: you set schedulerName in the pods
    None,
}

impl MutateWith {
    /// Return the default for a version, which is the choice that needs no flags of the API server.
    pub fn of(version: KubernetesVersion) -> MutateWith {
        if version.minor >= POLICY_GA {
            MutateWith::Policy
        } else {
            MutateWith::Webhook
        }
    }
}

/// The minor version in which MutatingAdmissionPolicy (KEP-3962) is beta, and off by default.
const POLICY_BETA: u32 = 34;
/// The minor version in which MutatingAdmissionPolicy is stable.
const POLICY_GA: u32 = 36;
/// The minor version in which `matchConditions` of webhooks (KEP-3716) are beta, and on by default. They are stable from 1.30 on.
const CONDITIONS: u32 = 28;

/// The object that assigns pods, with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mutation {
    /// A policy, see [`MutateWith::Policy`].
    Policy,
    /// A webhook, see [`MutateWith::Webhook`].
    Webhook(WebhookService),
    /// No object, see [`MutateWith::None`].
    None,
}

/// The extender's Service and CA, with which the API server calls the extender.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WebhookService {
    namespace: String,
    service: String,
    port: u16,
    ca: String,
}

impl WebhookService {
    /// Check that the API server can call the extender at `url`. `ca` is the CA of the extender's certificate, as base64 of PEM.
    /// The API server always expects the name of the Service in the certificate. A different `server_name`, which kube-scheduler
    /// would expect, is therefore an error.
    pub fn new(url: &str, server_name: Option<&str>, ca: &str) -> Result<WebhookService, SchedulerConfigError> {
        let wrong = |why: String| {
            SchedulerConfigError::Webhook(format!(
                "{why}. Use the extender that the chart installs, with TLS and a Service, with --from-cluster; or, if you manage its certificates in a \
                 Secret, add --extender-url https://NAME.NAMESPACE.svc:32766/gpushare-scheduler and --tls-secret; or omit the webhook \
                 with --mutate-with none"
            ))
        };
        let rest = url.strip_prefix("https://").ok_or_else(|| {
            wrong(format!(
                "the API server calls webhooks only over TLS, and the extender at {url} speaks plain HTTP"
            ))
        })?;
        let authority = rest.split('/').next().unwrap_or_default();
        let (host, port) = authority.rsplit_once(':').unwrap_or((authority, "443"));
        let port: u16 = port.parse().map_err(|_| wrong(format!("{url} has no valid port")))?;
        let parts: Vec<&str> = host.split('.').collect();
        let [service, namespace, "svc", ..] = parts[..] else {
            return Err(wrong(format!(
                "the API server reaches a webhook through a Service, and the host of {url} is not NAME.NAMESPACE.svc"
            )));
        };
        let expected = format!("{service}.{namespace}.svc");
        if let Some(other) = server_name.filter(|name| *name != expected) {
            return Err(wrong(format!(
                "the API server expects a webhook's certificate for the name {expected}, and --tls-server-name names {other}"
            )));
        }
        Ok(WebhookService {
            namespace: namespace.to_owned(),
            service: service.to_owned(),
            port,
            ca: ca.to_owned(),
        })
    }
}

impl Mutation {
    /// Return the manifests, in which `{name}` stands for the scheduler's name.
    pub(super) fn text(&self, version: KubernetesVersion, name: &str) -> Result<String, SchedulerConfigError> {
        match self {
            Mutation::Policy => policy(version),
            Mutation::Webhook(webhook) => {
                check_scheduler_name(name).map_err(|why| SchedulerConfigError::Webhook(format!("--profile {why}")))?;
                Ok(webhook.text(version, name))
            }
            Mutation::None => Ok(format!(
                "# Nothing assigns pods to this scheduler (--mutate-with none): set  schedulerName: {{name}}  in the pods (or their templates) that request {}.\n",
                assigned().collect::<Vec<_>>().join(" or ")
            )),
        }
    }
}

fn policy(version: KubernetesVersion) -> Result<String, SchedulerConfigError> {
    let (api, remark) = match version.minor {
        POLICY_GA.. => ("v1", String::new()),
        POLICY_BETA.. => (
            "v1beta1",
            format!(
                "# On Kubernetes {version} this is beta and off by default: the API server needs\n#   --feature-gates=MutatingAdmissionPolicy=true \
                 --runtime-config=admissionregistration.k8s.io/v1beta1=true\n# Without these flags kubectl reports 'no matches for kind'; \
                 use --mutate-with webhook then.\n",
            ),
        ),
        _ => return Err(SchedulerConfigError::NoPolicy(version)),
    };
    Ok(POLICY
        .replace("{remark}", &remark)
        .replace("{api}", api)
        .replace("{conditions}", &conditions("  ")))
}

impl WebhookService {
    fn text(&self, version: KubernetesVersion, name: &str) -> String {
        let why = match version.minor {
            POLICY_GA.. => {
                "Chosen with --mutate-with: on this version a MutatingAdmissionPolicy does the same without a call.".to_owned()
            }
            POLICY_BETA.. => format!(
                "A webhook, because MutatingAdmissionPolicy is beta and off by default on Kubernetes {version}. It needs flags of the API server, which a closed \
                 control plane\n# does not have. If they are set, use --mutate-with policy."
            ),
            _ => format!("A webhook, because Kubernetes {version} has no usable MutatingAdmissionPolicy."),
        };
        let conditions = match version.minor {
            CONDITIONS.. => format!(
                "  # The API server calls the extender only for these pods. The extender decides by the same rule.{}\n{}",
                match version.minor {
                    30.. => "",
                    _ => " Beta on this version, and enabled by default.",
                },
                conditions("  ")
            ),
            _ => format!(
                "  # Kubernetes {version} has no matchConditions (1.28 and later have): the API server calls the extender for every new pod.\n"
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

/// Return the name and the CEL expression of each condition. Together, the conditions express the rule of
/// [`divvy_extender::admission`].
fn rules() -> [(&'static str, String); 3] {
    let wants: Vec<String> = assigned().map(|name| format!("'{name}' in m")).collect();
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
# Assigns pods that request GPU memory and name no scheduler to this scheduler, so that no manifest changes.
{remark}apiVersion: admissionregistration.k8s.io/{api}
kind: MutatingAdmissionPolicy
metadata:
  name: {name}
spec:
  # Fail, because the cluster's own scheduler would bind a pod that is not assigned, without a GPU.
  failurePolicy: Fail
  # Call again if another admission plugin has changed the pod.
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
# Assigns pods that request GPU memory and name no scheduler to this scheduler, so that no manifest changes: the API server calls the extender.
# {why}
# The extender answers only if it is started with --webhook (Helm: extender.webhook=true).
# The control plane must reach port {port} of the extender's pods. Some clouds need a firewall rule for this. If only nodes can reach the pod network,
# the webhook does not work (the extender's metrics then show no request of verb mutate): set  schedulerName: {name}  in the pods instead.
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
    # The extender's certificate authority, which is valid for ten years. If its Secret is created again, create this object again as well.
    caBundle: {ca}
  # Ignore, so that no pod waits for an unavailable extender. The cluster's own scheduler then binds a GPU pod without a GPU, and the pod does not
  # start. divvy why POD explains this. Delete the pod, and its owner creates it again.
  failurePolicy: Ignore
  # The extender decides in less than a millisecond; a slower answer will not arrive at all.
  timeoutSeconds: 3
  sideEffects: None
  # Call again if another admission plugin has changed the pod.
  reinvocationPolicy: IfNeeded
  rules:
  - apiGroups: [\"\"]
    apiVersions: [v1]
    operations: [CREATE]
    resources: [pods]
    scope: Namespaced
  # Pods that the cluster needs to start are excluded. A pod in kube-system that requests GPU memory must name its scheduler.
  namespaceSelector:
    matchExpressions:
    - {key: kubernetes.io/metadata.name, operator: NotIn, values: [kube-system]}
{conditions}";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const URL: &str = "https://divvy-extender.divvy-system.svc:32766/gpushare-scheduler";

    fn version(text: &str) -> KubernetesVersion {
        text.parse().expect("a version")
    }

    fn webhook() -> Mutation {
        Mutation::Webhook(WebhookService::new(URL, None, "Y2E=").expect("an address"))
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
            let why = WebhookService::new(url, server_name, "Y2E=").expect_err(url).to_string();
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
        check("https://e.n.svc:x/gpushare-scheduler", None, "no valid port");
        check(
            URL,
            Some("other"),
            "expects a webhook's certificate for the name divvy-extender.divvy-system.svc",
        );
        for (url, port) in [
            ("https://e.n.svc.cluster.local:9/gpushare-scheduler", 9),
            ("https://e.n.svc/gpushare-scheduler", 443),
        ] {
            let found = WebhookService::new(url, Some("e.n.svc"), "Y2E=").expect("an address");
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

    /// Evaluate the printed CEL conditions for each pod, as the API server would, and compare them with the extender's answer.
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
