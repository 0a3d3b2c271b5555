//! Live migration, from the front end's side: what the back end marks in the log of changed
//! memory, and messages that a front end should not send.
//!
//! ```text
//!   marks     each page that the back end changes is marked, and no other
//!   copies    memory is copied by the log while requests run: the copy is equal
//!   handover  an image goes from one server to another
//!   messages  hostile and early messages, the device's state, postcopy
//!   suspend   rings are stopped without a drain, and go on here or elsewhere
//! ```

mod copies;
mod front;
mod handover;
mod marks;
mod messages;
mod suspend;
