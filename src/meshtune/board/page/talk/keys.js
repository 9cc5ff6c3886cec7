// Whether a key sends what was typed: Enter, not while an input method composes, and not with Shift.
export function sends(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing;
}
