//! Conditions and variables of limitador's limits: expressions of [CEL](https://cel.dev).

#[cfg(feature = "limitador")]
pub(super) use with_cel::{Expression, Values};
#[cfg(not(feature = "limitador"))]
pub(super) use without_cel::{Expression, Values};

/// The variables that expressions can ask for.
#[cfg(feature = "limitador")]
const VARIABLES: [&str; 2] = ["descriptors", "limit"];

#[cfg(feature = "limitador")]
mod with_cel {
    use std::collections::HashMap;
    use std::sync::{Arc, LazyLock};

    use cel::objects::Map;
    use cel::{Context, ExecutionError, Program, Value};

    use super::VARIABLES;

    /// The functions of expressions.
    static FUNCTIONS: LazyLock<Context<'static>> = LazyLock::new(Context::default);

    /// An expression.
    #[derive(Clone, Debug)]
    pub(in super::super) struct Expression {
        source: Arc<str>,
        program: Arc<Program>,
    }

    /// The values that a request's expressions ask for.
    pub(in super::super) struct Values(Context<'static>);

    impl Values {
        /// The entries of a request's descriptors: keys and values.
        pub(in super::super) fn new<'e>(descriptors: impl IntoIterator<Item = Vec<(&'e str, &'e str)>>) -> Self {
            let map = |entries: Vec<(&str, &str)>| {
                let values = entries.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned()));
                Value::Map(Map::from(values.collect::<HashMap<String, String>>()))
            };
            let mut context = FUNCTIONS.new_inner_scope();
            let descriptors: Vec<Value> = descriptors.into_iter().map(map).collect();
            context.add_variable_from_value("descriptors", Value::List(descriptors.into()));
            Self(context)
        }

        /// Sets the limit whose expressions are asked for.
        pub(in super::super) fn set_limit(&mut self, name: Option<&str>, id: Option<&str>) {
            let text = |text: Option<&str>| text.map_or(Value::Null, |text| Value::String(Arc::new(text.to_owned())));
            let limit = HashMap::from([("name", text(name)), ("id", text(id))]);
            self.0.add_variable_from_value("limit", Value::Map(Map::from(limit)));
        }
    }

    /// True if an expression asks for a descriptor or an entry that the request doesn't have.
    fn is_missing(error: &ExecutionError) -> bool {
        matches!(error, ExecutionError::NoSuchKey(_) | ExecutionError::IndexOutOfBounds(_))
    }

    impl Expression {
        pub(in super::super) fn parse(source: &str) -> Result<Self, String> {
            let program = Program::compile(source).map_err(|errors| {
                let messages = errors.errors.iter().map(|error| error.msg.trim().to_owned());
                messages.collect::<Vec<_>>().join("; ")
            })?;
            Ok(Self { source: source.into(), program: Arc::new(program) })
        }

        pub(in super::super) fn source(&self) -> &str {
            &self.source
        }

        /// A variable that no request has.
        pub(in super::super) fn unknown_variable(&self) -> Option<String> {
            let references = self.program.references();
            references.variables().into_iter().find(|name| !VARIABLES.contains(name)).map(str::to_owned)
        }

        /// True if the condition holds. False if it asks for an entry that isn't there. True if it has no meaning for
        /// these values, so that no client's value can escape a limit.
        pub(in super::super) fn holds(&self, values: &Values) -> bool {
            match self.program.execute(&values.0) {
                Ok(Value::Bool(holds)) => holds,
                Err(error) if is_missing(&error) => false,
                _ => self.unknown_variable().is_none(),
            }
        }

        /// The value. `None` if it is that of an entry that isn't there. Empty if there is none for these values.
        pub(in super::super) fn value(&self, values: &Values) -> Option<String> {
            Some(match self.program.execute(&values.0) {
                Ok(Value::Int(number)) => number.to_string(),
                Ok(Value::UInt(number)) => number.to_string(),
                Ok(Value::Float(number)) => number.to_string(),
                Ok(Value::String(text)) => text.to_string(),
                Ok(Value::Bool(flag)) => flag.to_string(),
                Ok(Value::Null) => "null".to_owned(),
                Err(error) if is_missing(&error) => return None,
                _ if self.unknown_variable().is_some() => return None,
                _ => String::new(),
            })
        }
    }
}

#[cfg(not(feature = "limitador"))]
mod without_cel {
    /// An expression. This build has none.
    #[derive(Clone, Debug)]
    pub(in super::super) enum Expression {}

    /// The values that a request's expressions ask for.
    pub(in super::super) struct Values;

    impl Values {
        pub(in super::super) fn new<'e>(_: impl IntoIterator<Item = Vec<(&'e str, &'e str)>>) -> Self {
            Self
        }

        pub(in super::super) fn set_limit(&mut self, _: Option<&str>, _: Option<&str>) {}
    }

    impl Expression {
        pub(in super::super) fn parse(_: &str) -> Result<Self, String> {
            Err("this program was built without the feature `limitador`".to_owned())
        }

        pub(in super::super) fn source(&self) -> &str {
            match *self {}
        }

        pub(in super::super) fn unknown_variable(&self) -> Option<String> {
            match *self {}
        }

        pub(in super::super) fn holds(&self, _: &Values) -> bool {
            match *self {}
        }

        pub(in super::super) fn value(&self, _: &Values) -> Option<String> {
            match *self {}
        }
    }
}
