//! The Lease that elects one of several replicas as the leader. This module reads and writes it by the rules of [`crate::election`],
//! and passes the result on to the host.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use tokio_util::sync::CancellationToken;

use crate::clock::boot_ns;
use crate::election::{Election, ElectionStep, LeaseRecord, Rules};
use crate::error::AskError;
use crate::shared::ExtenderState;

/// The Lease of the election, and this replica's data in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseCandidate {
    /// `--lease`: the Lease's namespace.
    pub namespace: String,
    /// `--lease`: the Lease's name.
    pub name: String,
    /// The replica's name for people: the name of its pod.
    pub replica: String,
    /// The address at which the other replicas reach this one.
    pub address: SocketAddr,
    /// The durations of the election.
    pub rules: Rules,
}

/// Return the holder identity for the Lease: the replica's name, a nonce that is unique to this process, and the replica's URL.
pub(crate) fn identity(candidate: &LeaseCandidate, nonce: u64, scheme: &str) -> String {
    format!("{}_{nonce:016x}@{scheme}://{}", candidate.replica, candidate.address)
}

/// Return the URL in a holder identity, which follows the `@`; `None` if it is not a URL with an IP address and a port.
pub(crate) fn address_of(holder: &str) -> Option<&str> {
    let (_, address) = holder.rsplit_once('@')?;
    let rest = address.strip_prefix("https://").or_else(|| address.strip_prefix("http://"))?;
    rest.parse::<SocketAddr>().ok().map(|_| address)
}

/// Timeout of one request. It is short enough that after a request that hangs, another one can be sent before the Lease is lost.
const ANSWER: Duration = Duration::from_secs(3);

/// Take part in the election until `stop`. Return the member, which can release the Lease.
pub(crate) async fn take_part(
    candidate: LeaseCandidate,
    identity: String,
    shared: Arc<ExtenderState>,
    stop: CancellationToken,
) -> ElectionMember {
    let api: Api<Lease> = Api::namespaced(shared.client(), &candidate.namespace);
    let mut member = ElectionMember {
        election: Election::new(identity, candidate.rules),
        api,
        candidate,
        said: None,
    };
    loop {
        let pause = Duration::from_nanos(member.election.rules().retry_ns);
        tokio::select! {
            () = stop.cancelled() => return member,
            result = member.read_lease(&shared) => shared.set_lease_trouble(member.report(result)),
        }
        shared.follow(member.election.holder());
        tokio::select! {
            () = stop.cancelled() => return member,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// A replica that takes part in the election.
pub(crate) struct ElectionMember {
    election: Election,
    api: Api<Lease>,
    candidate: LeaseCandidate,
    said: Option<String>,
}

impl ElectionMember {
    async fn read_lease(&mut self, shared: &Arc<ExtenderState>) -> Result<(), AskError> {
        let found = answered(self.api.get_opt(&self.candidate.name)).await?;
        let found = found.map(|lease| (record(&lease), lease.metadata.resource_version.clone().unwrap_or_default()));
        let step = self.election.read(found, boot_ns(), unix_us());
        let (record, version) = match step {
            ElectionStep::Wait => return Ok(()),
            ElectionStep::Create(record) => (record, None),
            ElectionStep::Replace { version, record } => (record, Some(version)),
        };
        if self.election.would_take_over() {
            // What this replica knew before is too old to bind pods with.
            shared.stand_by();
        }
        let sent_ns = boot_ns();
        let Some(version) = self.write(&record, version).await? else {
            return Ok(());
        };
        self.election.written(record, version, sent_ns);
        shared.lead_until(self.election.held_until_ns());
        Ok(())
    }

    /// Write the Lease and return its new version; `None` if another replica wrote it first.
    async fn write(&self, record: &LeaseRecord, version: Option<String>) -> Result<Option<String>, AskError> {
        let lease = lease(&self.candidate, record, version.clone());
        let params = PostParams::default();
        let request = async {
            match version {
                None => self.api.create(&params, &lease).await,
                Some(_) => self.api.replace(&self.candidate.name, &params, &lease).await,
            }
            .map(Some)
            .or_else(|error| match error {
                kube::Error::Api(status) if matches!(status.code, 404 | 409) => Ok(None),
                error => Err(error),
            })
        };
        Ok(answered(request).await?.and_then(|lease| lease.metadata.resource_version))
    }

    /// Release the Lease, so that another replica can lead at once. Call this only when none of this replica's binds is under way.
    pub(crate) async fn release(mut self) {
        let Some((version, record)) = self.election.release() else {
            return;
        };
        match self.write(&record, Some(version)).await {
            Ok(Some(_)) => tracing::info!("the lease was released; another replica may lead now"),
            Ok(None) => tracing::info!("the lease belongs to another replica"),
            Err(error) => tracing::warn!(%error, "the lease could not be released; another replica can lead after it expires"),
        }
    }

    fn report(&mut self, result: Result<(), AskError>) -> Option<String> {
        let LeaseCandidate { namespace, name, .. } = &self.candidate;
        let said = result.err().map(|error| error.to_string());
        if let Some(why) = &said
            && self.said.as_ref() != Some(why)
        {
            tracing::error!(lease = %format!("{namespace}/{name}"), %why, "the lease cannot be read or written, so this replica binds no pods");
        }
        self.said = said;
        self.said.clone()
    }
}

async fn answered<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, AskError> {
    match tokio::time::timeout(ANSWER, request).await {
        Ok(answer) => Ok(answer?),
        Err(_elapsed) => Err(AskError::ApiServerLate(ANSWER)),
    }
}

fn record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    let micros = |time: Option<MicroTime>| time.map_or(0, |time| time.0.as_microsecond());
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        lease_s: spec.lease_duration_seconds.unwrap_or(0),
        acquired_us: micros(spec.acquire_time),
        renewed_us: micros(spec.renew_time),
        transitions: spec.lease_transitions.unwrap_or(0),
    }
}

fn lease(candidate: &LeaseCandidate, record: &LeaseRecord, version: Option<String>) -> Lease {
    let time = |micros: i64| Timestamp::from_microsecond(micros).ok().map(MicroTime);
    Lease {
        metadata: ObjectMeta {
            name: Some(candidate.name.clone()),
            namespace: Some(candidate.namespace.clone()),
            resource_version: version,
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(record.holder.clone()),
            lease_duration_seconds: Some(record.lease_s),
            acquire_time: time(record.acquired_us),
            renew_time: time(record.renewed_us),
            lease_transitions: Some(record.transitions),
            ..LeaseSpec::default()
        }),
    }
}

fn unix_us() -> i64 {
    let passed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(passed.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_leader_is_reached_at_the_address_in_its_identity() {
        let candidate = LeaseCandidate {
            namespace: "divvy-system".to_owned(),
            name: "divvy-extender".to_owned(),
            replica: "divvy-extender-7c9-x".to_owned(),
            address: "10.0.0.3:32766".parse().expect("an address"),
            rules: Rules::default(),
        };
        let holder = identity(&candidate, 7, "https");
        assert_eq!(holder, "divvy-extender-7c9-x_0000000000000007@https://10.0.0.3:32766");
        assert_eq!(address_of(&holder), Some("https://10.0.0.3:32766"));
        let six = LeaseCandidate {
            address: "[fd00::3]:32766".parse().expect("an address"),
            ..candidate
        };
        assert_eq!(address_of(&identity(&six, 7, "http")), Some("http://[fd00::3]:32766"));
        for nonsense in [
            "",
            "x",
            "x@",
            "x@https://",
            "x@https://a.example:1",
            "x@ftp://1.2.3.4:5",
            "x@https://1.2.3.4:5/path",
        ] {
            assert_eq!(address_of(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let candidate = LeaseCandidate {
            namespace: "a".to_owned(),
            name: "b".to_owned(),
            replica: "c".to_owned(),
            address: "127.0.0.1:1".parse().expect("an address"),
            rules: Rules::default(),
        };
        let written = LeaseRecord {
            holder: "me".to_owned(),
            lease_s: 15,
            acquired_us: 1_800_000_000_000_001,
            renewed_us: 1_800_000_000_500_002,
            transitions: 3,
        };
        assert_eq!(record(&lease(&candidate, &written, Some("7".to_owned()))), written);
    }
}
