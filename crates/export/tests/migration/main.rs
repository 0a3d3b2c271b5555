//! Live migration, from the front end's side: what the back end marks in the log of changed
//! memory, and messages that a front end should not send.
//!
//! ```text
//!   marks     each page that the back end changes is marked, and no other
//!   copies    memory is copied by the log while requests run: the copy is equal
//!   messages  hostile and early messages, the device's state, postcopy
//! ```

mod copies;
mod front;
mod marks;
mod messages;
