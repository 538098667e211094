//! A check: its description, the function that computes its verdict, and the repairs that it can propose.

pub use crate::verdict::{CheckFinding, CheckGroup, CheckStop, CheckVerdict, Needs, Repair, Severity};
pub(crate) use crate::verdict::{blind, count, milder, problem, repaired_by, skip};

use crate::Facts;

/// One check.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// The id, such as `D01`, for use with `--only` and in conversations. An id is never reused for another check.
    pub id: &'static str,
    /// The statement that is true when the check passes.
    pub title: &'static str,
    /// The link to which the check belongs, in the chain from the driver to the pods.
    pub group: CheckGroup,
    /// The severity of the check's most severe finding.
    pub severity: Severity,
    /// The source of the facts that the check needs.
    pub needs: Needs,
    /// The function that judges the facts.
    pub run: fn(&Facts<'_>) -> CheckVerdict,
}
