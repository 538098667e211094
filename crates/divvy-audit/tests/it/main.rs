//! Histories, and what the audit finds in them.

mod audit;
mod units;
