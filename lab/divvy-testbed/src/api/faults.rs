//! Faults on request: misbehavior of an API server and of the network before it, defined by rules and repeatable by seed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_testkit::dice::Dice;
use tokio::sync::watch;

use super::error::ApiError;
use super::registry::ApiRegistry;
use super::store::StoreContent;

/// The requests that a rule matches. Unset fields match everything. Patterns may contain `*`.
#[derive(Debug, Clone, Default)]
pub struct Match {
    verbs: Vec<String>,
    resource: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    client: Option<String>,
}

impl Match {
    /// Match every request for a resource.
    pub fn any() -> Match {
        Match::default()
    }

    /// Match a verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, or `deletecollection`. After several calls,
    /// any of the verbs matches.
    pub fn verb(mut self, verb: &str) -> Match {
        self.verbs.push(verb.to_owned());
        self
    }

    /// Match a resource pattern: `pods`, `pods/binding`, `pods*`, `leases.coordination.k8s.io`, …
    pub fn resource(mut self, pattern: &str) -> Match {
        self.resource = Some(pattern.to_owned());
        self
    }

    /// Match a pattern of the namespace.
    pub fn namespace(mut self, pattern: &str) -> Match {
        self.namespace = Some(pattern.to_owned());
        self
    }

    /// Match a pattern of the object's name.
    pub fn name(mut self, pattern: &str) -> Match {
        self.name = Some(pattern.to_owned());
        self
    }

    /// Match a pattern of the user (see [`ApiServer::kubeconfig_for`](super::ApiServer::kubeconfig_for)) or of the User-Agent.
    pub fn client(mut self, pattern: &str) -> Match {
        self.client = Some(pattern.to_owned());
        self
    }

    fn covers(&self, facts: &RequestFacts) -> bool {
        let fits = |pattern: &Option<String>, text: &str| pattern.as_deref().is_none_or(|p| glob(p, text));
        (self.verbs.is_empty() || self.verbs.iter().any(|verb| verb == facts.verb))
            && fits(&self.resource, &facts.resource)
            && fits(&self.namespace, &facts.namespace)
            && fits(&self.name, &facts.name)
            && (fits(&self.client, &facts.user) || fits(&self.client, &facts.user_agent))
    }
}

/// The effect of a rule on a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Delay the request by this time.
    Latency(Duration),
    /// Refuse the request with this HTTP code (409, 429, 500, 503, 504, …) without carrying it out.
    Refuse(u16),
    /// Carry out the request, then break the connection before the response.
    LoseAnswer,
    /// Break the connection before the request is carried out.
    LoseRequest,
    /// Neither carry out nor answer the request until the rule is removed; then break the connection.
    Hang,
}

/// A rule: which requests it matches, how often it applies, and its effect.
#[derive(Debug, Clone)]
pub struct FaultRule {
    matching: Match,
    effect: Effect,
    times: Option<u64>,
    /// The chance in percent, and what decides.
    chance: Option<(u32, Dice)>,
}

impl FaultRule {
    /// Create a rule for every matching request.
    pub fn new(matching: Match, effect: Effect) -> FaultRule {
        FaultRule {
            matching,
            effect,
            times: None,
            chance: None,
        }
    }

    /// Apply the rule only to the first `count` matching requests.
    pub fn times(mut self, count: u64) -> FaultRule {
        self.times = Some(count);
        self
    }

    /// Apply the rule with a chance of `percent`, repeatable by seed.
    pub fn chance(mut self, percent: u32, seed: u64) -> FaultRule {
        self.chance = Some((percent, Dice::new(seed)));
        self
    }
}

/// The identifier of an added rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RuleId(u64);

/// The attributes of a request that rules examine.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestFacts {
    pub(crate) verb: &'static str,
    pub(crate) resource: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) user: String,
    pub(crate) user_agent: String,
}

/// The combined effect of all rules on one request.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    pub(crate) latency: Duration,
    pub(crate) refuse: Option<ApiError>,
    pub(crate) lose_answer: bool,
    pub(crate) lose_request: bool,
    /// The receiver that learns when the rule with [`Effect::Hang`] is removed.
    pub(crate) hang: Option<watch::Receiver<()>>,
}

#[derive(Debug)]
struct Active {
    rule: FaultRule,
    fired: u64,
    removed: watch::Sender<()>,
}

/// The server's faults. Clones are handles to the same faults.
#[derive(Debug, Clone)]
pub struct Faults {
    registry: Arc<ApiRegistry>,
    rules: Arc<Mutex<(u64, BTreeMap<RuleId, Active>)>>,
    pub(crate) down: watch::Sender<bool>,
    pub(crate) held: watch::Sender<bool>,
    pub(crate) cuts: watch::Sender<u64>,
}

impl Faults {
    pub(crate) fn new(registry: Arc<ApiRegistry>) -> Faults {
        Faults {
            registry,
            rules: Arc::default(),
            down: watch::Sender::new(false),
            held: watch::Sender::new(false),
            cuts: watch::Sender::new(0),
        }
    }

    fn rules(&self) -> MutexGuard<'_, (u64, BTreeMap<RuleId, Active>)> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a rule. It applies to requests from now on. All rules that match a request take effect together.
    pub fn add(&self, rule: FaultRule) -> RuleId {
        let mut rules = self.rules();
        rules.0 += 1;
        let id = RuleId(rules.0);
        let active = Active {
            rule,
            fired: 0,
            removed: watch::Sender::new(()),
        };
        rules.1.insert(id, active);
        id
    }

    /// Remove a rule. Return how many times it fired.
    pub fn remove(&self, id: RuleId) -> u64 {
        self.rules().1.remove(&id).map_or(0, |active| active.fired)
    }

    /// Remove all rules, release the held watches, and bring the server up.
    pub fn clear(&self) {
        self.rules().1.clear();
        self.hold_watches(false);
        self.set_down(false);
    }

    /// Return how many times a rule has fired; 0 if it was removed.
    pub fn fired(&self, id: RuleId) -> u64 {
        self.rules().1.get(&id).map_or(0, |active| active.fired)
    }

    /// End all watch streams cleanly, as a restarting server or a proxy with a timeout does.
    pub fn cut_watches(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Forget past changes. A client that watches from an earlier revision gets 410 and must list again.
    pub fn compact(&self) {
        self.registry.store.write(StoreContent::compact);
    }

    /// Hold or release the watches. While held, watches deliver nothing, so that clients' caches become stale.
    pub fn hold_watches(&self, held: bool) {
        self.held.send_replace(held);
    }

    /// Take the server down or bring it up. While it is down, watches end and every request's connection breaks.
    pub fn set_down(&self, down: bool) {
        self.down.send_replace(down);
        if down {
            self.cut_watches();
        }
    }

    pub(crate) fn plan(&self, facts: &RequestFacts) -> FaultPlan {
        let mut plan = FaultPlan::default();
        for active in self.rules().1.values_mut() {
            let Active { rule, .. } = active;
            if !rule.matching.covers(facts) || rule.times.is_some_and(|times| active.fired >= times) {
                continue;
            }
            if let Some((percent, dice)) = &mut rule.chance
                && !dice.percent(u64::from(*percent))
            {
                continue;
            }
            active.fired += 1;
            match &rule.effect {
                Effect::Latency(time) => plan.latency += *time,
                Effect::Refuse(code) => plan.refuse = Some(refusal(*code)),
                Effect::LoseAnswer => plan.lose_answer = true,
                Effect::LoseRequest => plan.lose_request = true,
                Effect::Hang => plan.hang = Some(active.removed.subscribe()),
            }
        }
        plan
    }
}

fn refusal(code: u16) -> ApiError {
    let (reason, message) = match code {
        403 => ("Forbidden", "forbidden"),
        409 => (
            "Conflict",
            "the object has been modified; please apply your changes to the latest version and try again",
        ),
        429 => (
            "TooManyRequests",
            "the server has received too many requests and has asked us to try again later",
        ),
        500 => ("InternalError", "Internal error occurred"),
        503 => ("ServiceUnavailable", "the server is currently unable to handle the request"),
        504 => (
            "Timeout",
            "the server was unable to return a response in the time allotted, but may still be processing the request",
        ),
        _ => ("Unknown", "unknown"),
    };
    ApiError::new(code, reason, format!("{message} (a fault on request)"))
}

/// Report whether a text matches a pattern in which `*` stands for any text.
fn glob(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((head, tail)) => text
            .strip_prefix(head)
            .is_some_and(|rest| (0..=rest.len()).any(|at| rest.get(at..).is_some_and(|rest| glob(tail, rest)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_with_stars() {
        for (pattern, text, expected) in [
            ("pods", "pods", true),
            ("pods", "pods/binding", false),
            ("pods*", "pods/binding", true),
            ("*", "", true),
            ("a*b*c", "a-b-c", true),
            ("a*b*c", "a-c", false),
            ("*é", "caffé", true),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} {text}");
        }
    }
}
