//! Tests of Xen devices from the front end's side, without a hypervisor.
//!
//! ```text
//!   device      states, rings, operations, servers that come and go
//!   hostile     invalid actions of a front end
//!   toolstack   devices that a toolstack creates
//!   session     the front end requests no more than is offered
//!   guest       a back end with a disk, a domain with its front end
//!   lines       warnings of the log
//! ```

mod device;
mod guest;
mod hostile;
mod lines;
mod session;
mod toolstack;
