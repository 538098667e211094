//! The addresses of the pages.

use std::fmt::{self, Display};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// What stays as it is in a part of a path.
const KEPT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');
/// The maximum size of an address in bytes.
const BYTES: usize = 4096;
/// The maximum size of a name in an address, in bytes before it is encoded. Kubernetes allows at most 253, and product names are shorter. The limit keeps
/// an address below [`BYTES`] when it is written with all its characters encoded.
const NAME_BYTES: usize = 256;

/// The path and the query of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageAddress {
    /// All nodes, or those that a filter selects.
    Cluster(Filter),
    /// One node.
    Node(String),
    /// One pod.
    Pod {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
    /// The pods that wait.
    Waiting,
}

/// Which nodes are shown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Those with a pod of this namespace.
    pub namespace: Option<String>,
    /// Those with a GPU of this product name.
    pub model: Option<String>,
    /// Those with so much free memory on one GPU, in GiB.
    pub free: Option<u64>,
    /// Those without or with problems.
    pub health: Option<ConditionFilter>,
    /// The page, starting at 0.
    pub page: usize,
}

/// The condition of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConditionFilter {
    /// All its GPUs can be used.
    Ok,
    /// At least one GPU cannot be used, or its containers get wrong driver libraries.
    Problem,
}

impl ConditionFilter {
    pub(crate) fn word(self) -> &'static str {
        match self {
            ConditionFilter::Ok => "ok",
            ConditionFilter::Problem => "problem",
        }
    }
}

/// Why a text is not the address of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAddress {
    /// There is no such page.
    Unknown,
    /// A value in the query is wrong: a sentence.
    Wrong(String),
}

impl PageAddress {
    /// Read a path with its query: `/nodes/gpu-a`, `/?namespace=ml&page=2`.
    ///
    /// # Errors
    /// There is no such page, or a value in the query is wrong.
    pub fn parse(text: &str) -> Result<PageAddress, NoAddress> {
        if text.len() > BYTES {
            return Err(NoAddress::Unknown);
        }
        let (path, query) = text.split_once('?').unwrap_or((text, ""));
        let parts: Option<Vec<String>> = path
            .strip_prefix('/')
            .ok_or(NoAddress::Unknown)?
            .split('/')
            .map(decoded)
            .collect();
        match parts.as_deref().unwrap_or_default() {
            [root] if root.is_empty() => Filter::parse(query).map(PageAddress::Cluster),
            [nodes, name] if nodes == "nodes" && !name.is_empty() => Ok(PageAddress::Node(name.clone())),
            [pods, namespace, name] if pods == "pods" && !namespace.is_empty() && !name.is_empty() => Ok(PageAddress::Pod {
                namespace: namespace.clone(),
                name: name.clone(),
            }),
            [waiting] if waiting == "waiting" => Ok(PageAddress::Waiting),
            _ => Err(NoAddress::Unknown),
        }
    }
}

fn decoded(part: &str) -> Option<String> {
    let name = percent_decode_str(part).decode_utf8().ok()?;
    (name.len() <= NAME_BYTES).then(|| name.into_owned())
}

impl Display for PageAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let encoded = |part| utf8_percent_encode(part, KEPT);
        match self {
            PageAddress::Cluster(filter) => {
                let query = filter.query();
                if query.is_empty() {
                    f.write_str("/")
                } else {
                    write!(f, "/?{query}")
                }
            }
            PageAddress::Node(name) => write!(f, "/nodes/{}", encoded(name)),
            PageAddress::Pod { namespace, name } => write!(f, "/pods/{}/{}", encoded(namespace), encoded(name)),
            PageAddress::Waiting => f.write_str("/waiting"),
        }
    }
}

impl Filter {
    fn parse(query: &str) -> Result<Filter, NoAddress> {
        let mut filter = Filter::default();
        for (key, value) in form_urlencoded::parse(query.as_bytes()) {
            if value.is_empty() {
                continue;
            }
            let number = || {
                let wrong = || NoAddress::Wrong(format!("{key}={value:?} is not a whole number."));
                value.trim().parse::<u32>().map_err(|_| wrong())
            };
            match &*key {
                "namespace" | "model" if value.len() > NAME_BYTES => {
                    return Err(NoAddress::Wrong(format!(
                        "{key} has {} bytes; no {key} has more than {NAME_BYTES}.",
                        value.len()
                    )));
                }
                "namespace" => filter.namespace = Some(value.into_owned()),
                "model" => filter.model = Some(value.into_owned()),
                "free" => filter.free = Some(u64::from(number()?)),
                "page" => filter.page = number()?.saturating_sub(1) as usize,
                "health" => {
                    let all = [ConditionFilter::Ok, ConditionFilter::Problem];
                    let condition = all.into_iter().find(|condition| condition.word() == value);
                    let wrong = || NoAddress::Wrong(format!("health={value:?} is neither ok nor problem."));
                    filter.health = Some(condition.ok_or_else(wrong)?);
                }
                // Another program's parameter does not matter here.
                _ => {}
            }
        }
        Ok(filter)
    }

    fn query(&self) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        for (key, value) in [("namespace", &self.namespace), ("model", &self.model)] {
            if let Some(value) = value {
                query.append_pair(key, value);
            }
        }
        if let Some(free) = self.free {
            query.append_pair("free", &free.to_string());
        }
        if let Some(condition) = self.health {
            query.append_pair("health", condition.word());
        }
        if self.page > 0 {
            query.append_pair("page", &(self.page + 1).to_string());
        }
        query.finish()
    }

    /// Report whether the filter selects anything but all nodes.
    pub(crate) fn selects(&self) -> bool {
        *self
            != Filter {
                page: self.page,
                ..Filter::default()
            }
    }
}
