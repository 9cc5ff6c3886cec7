// The recipe's JSON schema as a list of fields: what each takes, its default and its help.

const SECTIONS = ['model', 'data', 'stage', 'rollout', 'method', 'quantize', 'train', 'optimizer', 'compute', 'mesh', 'eval', 'sample', 'evaluate',
  'checkpoint', 'log', 'hub'];
const PLACED = { rewards: 'rollout' }; // a list that is shown with a section

// The fields of a recipe with these values, in the order of the schema: {path, section, kind, choices, fallback, help}.
// `kind` is boolean, choice, number, text, lines, yaml, sources, sections; `fallback` is the default.
export function fieldsOf(schema, values) {
  const fields = [];
  for (const [name, property] of Object.entries(schema.properties)) {
    const section = sectionOf(schema, property, values?.[name]);
    if (!section) fields.push(field(schema, name, PLACED[name] ?? '', property));
    for (const [key, inner] of Object.entries(section?.properties ?? {})) {
      const below = inner.$ref && resolved(schema, inner).properties;
      if (below) fields.push(...Object.entries(below).map(([last, entry]) => field(schema, `${name}.${key}.${last}`, name, entry)));
      else fields.push(field(schema, `${name}.${key}`, name, inner));
    }
  }
  const order = (name) => (SECTIONS.indexOf(name) + SECTIONS.length + 1) % (SECTIONS.length + 1);
  return fields.sort((first, second) => order(first.section) - order(second.section));
}

// The value at a path such as 'train.steps', undefined where there is none.
export function at(values, path) {
  return path.split('.').reduce((inner, key) => (inner === null || typeof inner !== 'object' ? undefined : inner[key]), values);
}

// The section that a property holds: of several kinds the one that `value` is, or the first.
function sectionOf(schema, property, value) {
  if (property.$ref) return resolved(schema, property);
  if (property.discriminator) {
    const kind = value?.kind;
    return resolved(schema, property.oneOf.find((entry) => entry.$ref === property.discriminator.mapping[kind]) ?? property.oneOf[0]);
  }
  const inner = property.anyOf?.find((entry) => entry.$ref);
  return inner && resolved(schema, inner);
}

// The kinds of the entries of a list of sections such as `rewards`, in the order of the schema.
export function kindsOfEntries(schema, name) {
  const { oneOf, discriminator: { mapping } } = schema.properties[name].items;
  return oneOf.map(({ $ref }) => Object.keys(mapping).find((kind) => mapping[kind] === $ref));
}

// The fields of entry `index` of a list of sections: first those that must be given, last those of all kinds.
export function entryFields(schema, name, index, kind) {
  const { mapping } = schema.properties[name].items.discriminator;
  const sections = Object.values(mapping).map(($ref) => resolved(schema, { $ref }));
  const { properties, required = [] } = resolved(schema, { $ref: mapping[kind] });
  const rank = (key) => (required.includes(key) ? 0 : sections.every((section) => key in section.properties) ? 2 : 1);
  return Object.keys(properties).filter((key) => key !== 'kind').sort((first, second) => rank(first) - rank(second))
    .map((key) => ({ ...field(schema, `${name}.${index}.${key}`, name, properties[key]), label: key }));
}

// The kinds of a section such as `method`.
export function kindsOf(schema, name) {
  return Object.keys(schema.properties[name].discriminator.mapping);
}

// The keys that a section of this kind takes.
export function keysOf(schema, name, kind) {
  return Object.keys(resolved(schema, { $ref: schema.properties[name].discriminator.mapping[kind] }).properties);
}

function resolved(schema, entry) {
  return entry.$ref ? schema.$defs[entry.$ref.split('/').pop()] : entry;
}

function field(schema, path, section, property) {
  const options = (property.anyOf ?? [property]).filter((entry) => entry.type !== 'null');
  const choices = options.flatMap((entry) => entry.enum ?? (entry.const === undefined ? [] : [entry.const]));
  const rest = options.filter((entry) => entry.enum === undefined && entry.const === undefined);
  return {
    path, section, choices, help: property.description ?? '', fallback: property.default,
    kind: kindOf(path, schema, section, choices, rest),
  };
}

function kindOf(path, schema, section, choices, rest) {
  if (path === 'data.train') return 'sources';
  if (rest[0]?.items?.discriminator) return 'sections';
  if (path === `${section}.kind` && schema.properties[section]?.discriminator) return 'kind';
  if (choices.length && !rest.length) return 'choice';
  if (choices.length || rest.length !== 1) return 'yaml';
  const { type, items } = rest[0];
  if (type === 'boolean') return 'boolean';
  if (type === 'integer' || type === 'number') return 'number';
  if (type === 'string') return 'text';
  return type === 'array' && items?.type === 'string' && !items.enum ? 'lines' : 'yaml';
}
