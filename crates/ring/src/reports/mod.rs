//! What people and tracers see.
//!
//! ```text
//!   text        texts of guests and clients in messages     probe  static probes (USDT)
//!   log_budget  limits log lines that peers cause
//! ```

pub mod log_budget;
pub mod probe;
pub mod text;
