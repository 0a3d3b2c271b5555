//! The calls of the API, and their OpenAPI description.
//!
//! ```text
//!   routes       paths, parameters and bodies of the calls; the part of each in the description
//!   query        refuses query parameters that a call does not have
//!   description  completes the description
//! ```

pub(crate) mod description;
pub(crate) mod query;
pub(crate) mod routes;
