//! The ledger of allocations per node, feasibility, choice and explanation: pure functions
