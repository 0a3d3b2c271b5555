//! A deactivation that waits for the end of other work on the disk; see [`crate::live`].

#[derive(Debug, Default)]
pub(crate) struct Leaving {
    /// No guest has used the disk since.
    pub is_wanted: bool,
    /// A thread waits.
    pub is_waited_for: bool,
}
