//! What the two programs share: `blockyard`, which serves disks, and `blockyard-bench`, which
//! measures.
//!
//! ```text
//!   output    standard output and standard error of commands
//!   log       format and level of the log
//!   ending    errors as one line, and the exit status
//!   peer      finds the other program
//!   outline   a command line as data, for man pages and completions
//!   help      examples and general options in the help of both programs
//!   examples  the text of the examples
//!   costs     the file of device costs: bench calibrate writes it, serve reads it
//!   file      replaces a file atomically
//!   signals   those that the caller ignores
//! ```

// These macros panic when the stream cannot be written; `output` and the log do not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod costs;
pub mod ending;
pub mod examples;
pub mod file;
pub mod help;
pub mod log;
pub mod outline;
pub mod output;
pub mod peer;
pub mod signals;
