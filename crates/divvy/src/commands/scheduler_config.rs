//! `divvy scheduler-config`: prints or merges kube-scheduler's configuration, and checks that the scheduler calls the extender.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::Read as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use divvy_kube::{client, in_words, list, objects};
use k8s_openapi::api::core::v1::{Secret, Service};
use kube::api::{Api, DeleteParams, DynamicObject, PostParams};
use tokio::time::Instant;

use super::inspect::choice;
use super::say;
use crate::cli::{AccessArgs, ClusterArgs, SchedulerConfigArgs};
use crate::printer;
use crate::scheduler_config::check::{SchedulerVerdict, has_room, no_room, not_called, pod, unclear, verdict};
use crate::scheduler_config::distribution::Distribution;
use crate::scheduler_config::installed::{authority, installed, secret_name};
use crate::scheduler_config::merge::{ExtenderAddressSource, WantedSettings, merge};
use crate::scheduler_config::second_scheduler::mutation::{MutateWith, Mutation, WebhookService};
use crate::scheduler_config::second_scheduler::{
    DEFAULT_VERSION, KubernetesVersion, NAME, SECRET_NAME, SecondScheduler, TLS_DIRECTORY,
};
use crate::scheduler_config::{DEFAULT_PROFILE, Inline, LOCAL_URL, SERVICE_URL, Stanza, Tls, WholeConfig};
use divvy_program::Unclear;

/// The largest file for `--merge` in bytes; a scheduler's configuration has a few kilobytes.
const LARGEST_FILE: u64 = 1 << 20;
/// The time limit for one request to the API server.
const ANSWER: Duration = Duration::from_secs(15);
/// The pause between two reads of the pod that the check creates.
const LOOK: Duration = Duration::from_millis(200);

/// Print, merge, or check. Return `Ok(false)` if the check found that the scheduler does not call the extender.
pub async fn run(args: SchedulerConfigArgs) -> anyhow::Result<bool> {
    if args.check {
        return match check(&args).await {
            // An error before the check's end proves nothing, so the result is unknown.
            Err(error) if error.downcast_ref::<Unclear>().is_none() => {
                Err(error.context(Unclear("it is unknown whether the scheduler calls the extender".to_owned())))
            }
            told => told,
        };
    }
    let found = match &args.from_cluster {
        Some((namespace, name)) => Some(from_cluster(&args, namespace, name).await?),
        None => None,
    };
    if found.is_none() && args.extender_url.is_none() && args.merge.is_none() {
        say(if args.as_second_scheduler {
            "note: this is for an extender with plain HTTP behind the Service divvy-system/divvy-extender; the chart installs it with TLS, and --from-cluster \
             reads its address and certificates"
        } else {
            "note: this is for an extender with plain HTTP at the loopback address (Helm: extender.loopback=true); the chart's default is a Service with TLS, \
             and --from-cluster reads its address and certificates"
        })?;
    }
    let certificates = found.as_ref().and_then(|(_, tls)| tls.inline.clone());
    let stanza = stanza(&args, found)?.with_mig(args.mig_profiles.iter().copied());
    if let Some(warning) = stanza.warning() {
        say(&warning)?;
    }
    let kubeconfig = args
        .kubeconfig_path
        .as_deref()
        .unwrap_or_else(|| args.distribution.unwrap_or(Distribution::Kubeadm).kubeconfig());
    let stanza_is_secret = certificates.is_some() && args.distribution.is_none();
    let text = if let Some(file) = &args.merge {
        let wanted = WantedSettings {
            stanza,
            address: match (&args.extender_url, &args.from_cluster) {
                (Some(_), _) => ExtenderAddressSource::Flag,
                (None, Some(_)) => ExtenderAddressSource::Cluster,
                (None, None) => ExtenderAddressSource::Default,
            },
            kubeconfig: args.kubeconfig_path.clone(),
            default_kubeconfig: kubeconfig.to_owned(),
            profile: args.profile.clone(),
        };
        let (input, origin) = read(file)?;
        let merged = merge(&input, &origin, &wanted)?;
        for note in &merged.notes {
            say(note)?;
        }
        merged.text
    } else if let Some(distribution) = args.distribution {
        distribution.steps(kubeconfig, &passed_on(&args), &stanza)
    } else if args.as_second_scheduler {
        let version = version(&args).await?;
        SecondScheduler {
            stanza: &stanza,
            namespace: second_namespace(&args),
            name: args.profile.as_deref().unwrap_or(NAME),
            version,
            tls_secret: args.tls_secret.as_deref().or(certificates.as_ref().map(|_| SECRET_NAME)),
            certificates: certificates.as_ref(),
            mutation: &mutation(&args, version, &stanza, certificates.as_ref()).await?,
        }
        .text()?
    } else {
        WholeConfig {
            stanza: &stanza,
            kubeconfig: Some(kubeconfig),
            profile: args.profile.as_deref().unwrap_or(DEFAULT_PROFILE),
            lease: None,
        }
        .text()
    };
    match &args.output {
        None => {
            if stanza_is_secret {
                say(
                    "note: the output contains kube-scheduler's private key; -o FILE writes a file that only its owner can read",
                )?;
            }
            printer::print(&text)?;
        }
        Some(file) => {
            write(file, &text, stanza_is_secret)
                .with_context(|| format!("{} could not be written, and is unchanged", file.display()))?;
            say(&format!(
                "written: {}; the scheduler reads it when it next starts",
                file.display()
            ))?;
        }
    }
    Ok(true)
}

fn second_namespace(args: &SchedulerConfigArgs) -> &str {
    args.namespace.as_deref().unwrap_or("kube-system")
}

/// Return the mutation that assigns pods to the second scheduler. If it is a webhook, its CA comes from the same source as the
/// scheduler's certificates.
async fn mutation(
    args: &SchedulerConfigArgs,
    version: KubernetesVersion,
    stanza: &Stanza,
    certificates: Option<&Inline>,
) -> anyhow::Result<Mutation> {
    match args.mutate_with.unwrap_or(MutateWith::of(version)) {
        MutateWith::Policy => return Ok(Mutation::Policy),
        MutateWith::None => return Ok(Mutation::None),
        MutateWith::Webhook => {}
    }
    let ca = match (certificates, &args.tls_secret) {
        (Some(certificates), _) => certificates.ca.clone(),
        (None, Some(secret)) => authority_of(args, second_namespace(args), secret).await?,
        // The extender has no certificates. Continue without a CA, so that `WebhookService::new` can report a wrong address.
        (None, None) if args.from_cluster.is_some() => String::new(),
        (None, None) => anyhow::bail!(
            "on Kubernetes {version} a webhook assigns pods to the scheduler, and its manifest contains the extender's certificate authority. Add \
             --from-cluster, which reads the CA of the installed extender; or, if you manage the extender's certificates, add --extender-url \
             https://NAME.NAMESPACE.svc:32766/gpushare-scheduler and --tls-secret SECRET, whose ca.crt is read from namespace {}; or omit the \
             webhook with --mutate-with none, and set schedulerName in the pods",
            second_namespace(args)
        ),
    };
    Ok(Mutation::Webhook(WebhookService::new(
        stanza.url(),
        stanza.server_name(),
        &ca,
    )?))
}

/// Read `ca.crt` of a Secret, and return it in base64.
async fn authority_of(args: &SchedulerConfigArgs, namespace: &str, name: &str) -> anyhow::Result<String> {
    let client = client::connect(&choice(&args.cluster)).await?.client;
    let secrets: Api<Secret> = Api::namespaced(client, namespace);
    let secret = answer(async {
        secrets
            .get_opt(name)
            .await
            .map_err(|error| unread("Secret", namespace, name, &error))
    })
    .await?;
    let secret = secret.with_context(|| {
        format!(
            "there is no Secret {namespace}/{name}, and the webhook's manifest needs its ca.crt; create the Secret first (kubectl -n {namespace} create secret \
             generic {name} --from-file=ca.crt --from-file=tls.crt --from-file=tls.key), or choose its namespace with -n"
        )
    })?;
    authority(&secret).map_err(|why| anyhow::anyhow!("the Secret {namespace}/{name}: {why}"))
}

/// Return the URL and the certificates of the installed extender, from its Service and Secret.
async fn from_cluster(args: &SchedulerConfigArgs, namespace: &str, name: &str) -> anyhow::Result<(String, Tls)> {
    let client = client::connect(&choice(&args.cluster)).await?.client;
    let secret_name = secret_name(name);
    let services: Api<Service> = Api::namespaced(client.clone(), namespace);
    let secrets: Api<Secret> = Api::namespaced(client, namespace);
    let service = answer(async {
        services
            .get_opt(name)
            .await
            .map_err(|error| unread("Service", namespace, name, &error))
    })
    .await?;
    let service = service.with_context(|| {
        format!(
            "there is no Service {namespace}/{name}: either no extender is installed under that name (find it with kubectl get service -A | grep extender, and \
             write --from-cluster=NAMESPACE/NAME), or the extender listens only on the loopback address of its node (Helm: extender.loopback=true), and \
             --from-cluster is not needed"
        )
    })?;
    let secret = answer(async {
        secrets
            .get_opt(&secret_name)
            .await
            .map_err(|error| unread("Secret", namespace, &secret_name, &error))
    })
    .await?;
    if secret.is_none() {
        say(&format!(
            "warning: there is no Secret {namespace}/{secret_name}, so the extender probably speaks plain HTTP: every client that reaches {namespace}/{name} \
             can bind pods"
        ))?;
    }
    let now_s = jiff::Timestamp::now().as_second();
    let (url, mut tls) = installed(&service, secret.as_ref(), args.tls_server_name.as_deref(), now_s)?;
    if args.as_second_scheduler {
        // A pod can resolve the Service's name, and the Service's address may change.
        let host = format!("{name}.{namespace}.svc");
        let port = url.rsplit(':').next().unwrap_or_default();
        let scheme = url.split(':').next().unwrap_or_default();
        let url = format!("{scheme}://{host}:{port}");
        if tls.inline.is_some() {
            let file = |name: &str| Some(format!("{TLS_DIRECTORY}/{name}"));
            (tls.ca, tls.cert, tls.key) = (file("ca.crt"), file("tls.crt"), file("tls.key"));
        }
        return Ok((url, tls));
    }
    say(&format!(
        "note: the extender's address is {url}, according to the Service {namespace}/{name}"
    ))?;
    Ok((url, tls))
}

fn unread(kind: &str, namespace: &str, name: &str, error: &kube::Error) -> anyhow::Error {
    anyhow::anyhow!(
        "the {kind} {namespace}/{name} could not be read: {}; use a kubeconfig whose user may read it (--kubeconfig), or give the address and the \
         certificate files with --extender-url, --tls-ca, --tls-cert, and --tls-key",
        in_words(error)
    )
}

fn stanza(args: &SchedulerConfigArgs, found: Option<(String, Tls)>) -> anyhow::Result<Stanza> {
    if let Some((url, mut tls)) = found {
        if args.as_second_scheduler {
            tls.inline = None;
        }
        return Ok(Stanza::new(&url, tls)?);
    }
    let mut tls = Tls {
        inline: None,
        ca: args.tls_ca.clone(),
        cert: args.tls_cert.clone(),
        key: args.tls_key.clone(),
        server_name: args.tls_server_name.clone(),
    };
    if args.as_second_scheduler {
        if args.tls_secret.is_none() && (tls.ca.is_some() || tls.cert.is_some()) {
            anyhow::bail!(
                "--tls-ca and --tls-cert name files of the host, and the pod of a second scheduler does not have them: put ca.crt, tls.crt, and tls.key into a \
                 Secret of its namespace, and write --tls-secret NAME instead"
            );
        }
        if args.tls_secret.is_some() {
            let file = |given: Option<String>, name: &str| Some(given.unwrap_or_else(|| format!("{TLS_DIRECTORY}/{name}")));
            tls.ca = file(tls.ca, "ca.crt");
            tls.cert = file(tls.cert, "tls.crt");
            tls.key = file(tls.key, "tls.key");
        }
    }
    let default = if args.as_second_scheduler { SERVICE_URL } else { LOCAL_URL };
    Ok(Stanza::new(args.extender_url.as_deref().unwrap_or(default), tls)?)
}

/// Return the flags that the commands printed by `--for` must repeat, quoted for a shell.
fn passed_on(args: &SchedulerConfigArgs) -> String {
    let flags = [
        ("--extender-url", &args.extender_url),
        ("--profile", &args.profile),
        ("--tls-ca", &args.tls_ca),
        ("--tls-cert", &args.tls_cert),
        ("--tls-key", &args.tls_key),
        ("--tls-server-name", &args.tls_server_name),
    ];
    let given = flags.into_iter().filter_map(|(flag, value)| Some((flag, value.as_ref()?)));
    let cluster = args.from_cluster.as_ref().map(|(namespace, name)| {
        let kubeconfig = args
            .cluster
            .access
            .context
            .kubeconfig
            .as_ref()
            .map(|path| path.display().to_string());
        let kubeconfig = kubeconfig.unwrap_or_else(|| "/etc/kubernetes/admin.conf".to_owned());
        format!(" --from-cluster={namespace}/{name} --kubeconfig {}", shell(&kubeconfig))
    });
    let mig = args.mig_profiles.iter().map(|profile| format!(" --mig-profile {profile}"));
    given
        .map(|(flag, value)| format!(" {flag} {}", shell(value)))
        .chain(mig)
        .chain(cluster)
        .collect()
}

fn shell(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/:._-".contains(c);
    if word.chars().all(plain) && !word.is_empty() {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn read(file: &Path) -> anyhow::Result<(String, String)> {
    let (origin, input): (String, Box<dyn std::io::Read>) = if file == Path::new("-") {
        ("standard input".to_owned(), Box::new(std::io::stdin()))
    } else {
        let opened = std::fs::File::open(file).with_context(|| {
            format!(
                "--merge {}: the file could not be read; give the file of kube-scheduler's --config flag, or omit --merge for a new file",
                file.display()
            )
        })?;
        (file.display().to_string(), Box::new(opened))
    };
    let mut bytes = Vec::new();
    input
        .take(LARGEST_FILE + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("{origin} could not be read"))?;
    anyhow::ensure!(
        bytes.len() as u64 <= LARGEST_FILE,
        "{origin} is larger than 1 MiB, too large for a scheduler's configuration; give the file of kube-scheduler's --config flag"
    );
    let text = String::from_utf8(bytes).with_context(|| format!("{origin} is not UTF-8 text"))?;
    Ok((text, origin))
}

/// Replace the file atomically. Keep the permissions of an existing file, because the scheduler may run as another user. A file
/// with a private key is never readable by other users.
fn write(file: &Path, text: &str, secret: bool) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let new = if secret { 0o600 } else { 0o644 };
    let mode = std::fs::metadata(file).map_or(new, |there| there.permissions().mode() & if secret { 0o770 } else { 0o777 });
    super::write_whole(file, text, mode)
}

/// Report whether a flag selects a cluster.
fn names_a_cluster(args: &ClusterArgs) -> bool {
    let AccessArgs { context, server, .. } = &args.access;
    context.kubeconfig.is_some() || context.context.is_some() || server.is_some()
}

async fn version(args: &SchedulerConfigArgs) -> anyhow::Result<KubernetesVersion> {
    if let Some(version) = args.kubernetes_version {
        return Ok(version);
    }
    if args.from_cluster.is_none() && !names_a_cluster(&args.cluster) {
        say(&format!(
            "note: this is for Kubernetes {DEFAULT_VERSION}; for another version add --kubernetes-version, or --kubeconfig FILE to read it from the cluster"
        ))?;
        return Ok(DEFAULT_VERSION);
    }
    let connection = client::connect(&choice(&args.cluster)).await?;
    let found = connection.client.apiserver_version().await.map_err(|error| {
        anyhow::anyhow!(
            "the cluster's version could not be read ({}); add --kubernetes-version",
            in_words(&error)
        )
    })?;
    let version: KubernetesVersion = found.git_version.parse()?;
    say(&format!("note: the cluster is Kubernetes {}", found.git_version))?;
    Ok(version)
}

async fn check(args: &SchedulerConfigArgs) -> anyhow::Result<bool> {
    let stopped = divvy_program::until_stopped(false)?;
    let connection = client::connect(&choice(&args.cluster)).await?;
    let namespace = args.namespace.clone().unwrap_or(connection.namespace);
    let seen = answer(async {
        Ok(tokio::try_join!(
            list::nodes(&connection.client),
            list::pods(&connection.client, None)
        )?)
    });
    match seen.await {
        Ok((nodes, pods)) if !has_room(&nodes, &pods.pods) => return Err(Unclear(no_room()).into()),
        Ok(_) => {}
        // A user who may create a pod may not be allowed to list all pods. The scheduler's own message then tells of missing room.
        Err(error) => tracing::debug!("{error}"),
    }
    let api: Api<DynamicObject> = Api::namespaced_with(connection.client, &namespace, &objects::pods());
    // A random nonce, so that an earlier message cannot be mistaken for the extender's answer to this check.
    let nonce = format!("{:016x}", RandomState::new().build_hasher().finish());
    let name = format!("divvy-scheduler-check-{}", &nonce[..8]);
    let object: DynamicObject = serde_json::from_value(pod(&name, &namespace, &nonce, args.profile.as_deref()))?;

    let began = Instant::now();
    // Ctrl-C does not interrupt this request: the API server might still create the pod after we have deleted it.
    let told = match answer(create(&api, &object, &namespace)).await {
        Ok(Created::Refused(why)) => return Err(Unclear(why).into()),
        Ok(Created::Unknown(why)) => Err(Unclear(why).into()),
        Err(error) => Err(error),
        Ok(Created::Yes) => tokio::select! {
            told = watch(&api, &name, &nonce, began, args.timeout) => told,
            () = stopped.cancelled() => Err(Unclear("stopped before the scheduler had tried the pod".to_owned()).into()),
        },
    };
    // A request without an answer may have created the pod, so delete it in every case.
    let deleted = answer(delete(&api, &name)).await;
    match (told, deleted) {
        (told, Ok(())) => told,
        (told, Err(left)) => {
            say(&format!(
                "warning: the pod {namespace}/{name} may still exist ({left}); delete it: kubectl -n {namespace} delete pod {name}"
            ))?;
            told
        }
    }
}

/// Set a time limit for a request, so that an unreachable API server cannot delay the exit of the command.
async fn answer<T>(request: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    match tokio::time::timeout(ANSWER, request).await {
        Ok(answer) => answer,
        Err(_elapsed) => anyhow::bail!("the API server did not answer within {} s", ANSWER.as_secs()),
    }
}

/// Whether the check's pod was created.
enum Created {
    Yes,
    /// The API server refused the pod, so it does not exist.
    Refused(String),
    Unknown(String),
}

async fn create(api: &Api<DynamicObject>, object: &DynamicObject, namespace: &str) -> anyhow::Result<Created> {
    let Err(error) = api.create(&PostParams::default(), object).await else {
        return Ok(Created::Yes);
    };
    let why = format!(
        "the check's pod could not be created in namespace {namespace}: {}; choose another namespace with -n, or an account that may \
         create and delete pods there",
        in_words(&error)
    );
    Ok(match error {
        // With these codes the API server has changed nothing.
        kube::Error::Api(status) if matches!(status.code, 400 | 401 | 403 | 404 | 409 | 422 | 429) => Created::Refused(why),
        _ => Created::Unknown(why),
    })
}

async fn watch(api: &Api<DynamicObject>, name: &str, nonce: &str, began: Instant, timeout: Duration) -> anyhow::Result<bool> {
    let mut last = SchedulerVerdict::Waiting {
        scheduler: String::new(),
        said: None,
    };
    loop {
        let trouble = match api.get(name).await {
            Ok(object) => {
                last = verdict(&serde_json::to_value(&object)?, nonce);
                None
            }
            Err(error) => Some(in_words(&error)),
        };
        match &last {
            SchedulerVerdict::Called { scheduler } => {
                printer::line(&format!(
                    "The scheduler {scheduler:?} calls the extender: the extender's message was on the pod after {} ms.",
                    began.elapsed().as_millis()
                ))?;
                return Ok(true);
            }
            SchedulerVerdict::Bound {
                scheduler,
                node,
                by_extender,
            } => {
                printer::line(&not_called(scheduler, node, *by_extender))?;
                return Ok(false);
            }
            SchedulerVerdict::Waiting { scheduler, said } if began.elapsed() >= timeout => {
                let waited = format!("{} s", timeout.as_secs_f64());
                let text = match trouble {
                    Some(trouble) => format!("After {waited} the pod could not be read: {trouble}"),
                    None => unclear(scheduler, said.as_ref(), &waited),
                };
                return Err(Unclear(text).into());
            }
            SchedulerVerdict::Waiting { .. } => tokio::time::sleep(LOOK).await,
        }
    }
}

/// Delete the pod without a grace period, because it has no container that needs to shut down.
async fn delete(api: &Api<DynamicObject>, name: &str) -> anyhow::Result<()> {
    let params = DeleteParams::default().grace_period(0);
    match api.delete(name, &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(anyhow::anyhow!(in_words(&error))),
    }
}
