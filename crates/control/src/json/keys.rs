//! The keys of a disk, as an object of JSON in a body.
//!
//! In: JSON. Out: an object. What must hold: no key is there twice, because the server cannot know
//! which value the caller means.

use std::fmt;

use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use super::problem::{Kind, Problem};

/// A JSON object with the keys of a `[[disk]]` table. The server parses them itself.
pub type Object = Map<String, Value>;

/// The keys of a disk.
pub(crate) struct Keys {
    keys: Object,
    /// A key that the body has twice.
    twice: Option<String>,
}

impl Keys {
    /// Returns the keys. Fails if the body has one of them twice.
    pub fn unique(self) -> Result<Object, Problem> {
        match self.twice {
            None => Ok(self.keys),
            Some(key) => {
                let detail = format!("the body: the key {key:?} is there twice");
                Err(Problem::new(Kind::Malformed, detail))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Keys {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        d.deserialize_map(KeysVisitor)
    }
}

/// Deserializes the keys of a disk in a field of a body; see [`Keys::unique`].
pub(crate) fn unique_keys<'de, D: Deserializer<'de>>(d: D) -> Result<Object, D::Error> {
    match Keys::deserialize(d)? {
        Keys { keys, twice: None } => Ok(keys),
        Keys { twice: Some(key), .. } => {
            Err(D::Error::custom(format!("the key {key:?} is there twice")))
        }
    }
}

struct KeysVisitor;

impl<'de> Visitor<'de> for KeysVisitor {
    type Value = Keys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Keys, A::Error> {
        let (mut keys, mut twice) = (Object::new(), None);
        while let Some((key, value)) = map.next_entry::<String, Value>()? {
            if keys.insert(key.clone(), value).is_some() {
                twice.get_or_insert(key);
            }
        }
        Ok(Keys { keys, twice })
    }
}
