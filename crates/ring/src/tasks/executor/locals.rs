//! Executor-local state of the crates above: one value of each type, created at its first use.
//!
//! What must hold: the values are dropped with their executor, even if one of them holds a handle
//! to it.

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::rc::Rc;

#[derive(Default)]
pub(crate) struct Locals(RefCell<Vec<(TypeId, Rc<dyn Any>)>>);

impl Locals {
    pub fn get<T: Any + Default>(&self) -> Rc<T> {
        let find = || {
            let all = self.0.borrow();
            let (_, value) = all.iter().find(|(id, _)| *id == TypeId::of::<T>())?;
            value.clone().downcast().ok()
        };
        find().unwrap_or_else(|| {
            // The default may itself use other values.
            let new = Rc::<T>::default();
            self.0.borrow_mut().push((TypeId::of::<T>(), new.clone()));
            new
        })
    }

    /// Drops all values, and those that a dropped value creates during the drop.
    pub fn clear(&self) {
        loop {
            let all = std::mem::take(&mut *self.0.borrow_mut());
            if all.is_empty() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::{Executor, Handle};

    #[derive(Default)]
    struct Count(Cell<u32>);

    /// Holds its executor, and uses another value when it is dropped.
    #[derive(Default)]
    struct Cycle(RefCell<Option<(Handle, Rc<()>)>>);

    impl Drop for Cycle {
        fn drop(&mut self) {
            if let Some((handle, _)) = self.0.take() {
                handle.local::<Count>();
            }
        }
    }

    #[test]
    fn each_executor_has_one_value_of_a_type() {
        let (one, other) = (Executor::new().unwrap(), Executor::new().unwrap());
        one.handle().local::<Count>().0.set(3);
        assert_eq!(
            (one.handle().local::<Count>().0.get(), other.handle().local::<Count>().0.get()),
            (3, 0)
        );
    }

    #[test]
    fn values_are_dropped_with_their_executor() {
        let executor = Executor::new().unwrap();
        let sentinel = Rc::new(());
        *executor.handle().local::<Cycle>().0.borrow_mut() =
            Some((executor.handle().clone(), sentinel.clone()));
        drop(executor);
        assert_eq!(Rc::strong_count(&sentinel), 1);
    }
}
