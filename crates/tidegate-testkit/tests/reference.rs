//! The reference store passes the suite it is the reference for.

use tidegate_testkit::conformance::{Effort, conform};
use tidegate_testkit::reference::ReferenceStore;

#[test]
fn the_reference_store_conforms() {
    conform(&ReferenceStore::new, &Effort::default()).unwrap();
}
