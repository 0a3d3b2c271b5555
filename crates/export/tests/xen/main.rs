//! A device of Xen from its front end's side, without a hypervisor.
//!
//! ```text
//!   device   states, rings, operations, servers that come and go      hostile   what a front end may do wrong
//!   toolstack   devices whose nodes a toolstack makes
//!   session  what is offered, and no more, is asked for
//!   guest    a back end's disk, a domain with its front end           lines     what the log has
//! ```

mod device;
mod guest;
mod hostile;
mod lines;
mod session;
mod toolstack;
