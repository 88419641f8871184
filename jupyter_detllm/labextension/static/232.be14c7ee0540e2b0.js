"use strict";(self.rspackChunkjupyter_detllm=self.rspackChunkjupyter_detllm||[]).push([[232],{475(e,r,t){var o=t(601),a=t.n(o),n=t(314),l=(t.n(n))()(a());l.push([e.id,`/* Every colour is the theme's: light, dark and high contrast alike. */

.jp-detllm-status {
  display: inline-flex;
  align-items: center;
  gap: 5px;
  max-width: 32em;
  height: 100%;
  padding: 0 6px;
  border: 0;
  background: none;
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
  cursor: pointer;
}

.jp-detllm-status:hover {
  background: var(--jp-layout-color2);
}

.jp-detllm-status:focus-visible,
.jp-detllm-panel button:focus-visible {
  outline: 2px solid var(--jp-brand-color1);
  outline-offset: -2px;
}

.jp-detllm-label {
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.jp-detllm-dot {
  flex: none;
  width: 8px;
  height: 8px;
  box-sizing: border-box;
  border: 2px solid var(--jp-ui-font-color2);
  border-radius: 50%;
}

.jp-detllm-status[data-state='stamped'] .jp-detllm-dot {
  border-color: var(--jp-info-color1);
}

.jp-detllm-status[data-state='partly'] .jp-detllm-dot {
  border-color: var(--jp-warn-color1);
}

.jp-detllm-status[data-state='verified'] .jp-detllm-dot {
  border-color: var(--jp-success-color1);
  background: var(--jp-success-color1);
}

.jp-detllm-status[data-state='failed'] .jp-detllm-dot {
  border-color: var(--jp-error-color1);
  border-radius: 0;
  background: var(--jp-error-color1);
}

.jp-detllm-panel {
  overflow: auto;
  padding: 12px;
  background: var(--jp-layout-color1);
  color: var(--jp-ui-font-color1);
  font-family: var(--jp-ui-font-family);
  font-size: var(--jp-ui-font-size1);
}

.jp-detllm-title {
  margin: 0 0 4px;
  font-size: var(--jp-ui-font-size2);
  overflow-wrap: anywhere;
}

.jp-detllm-summary {
  margin: 0 0 8px;
  padding-left: 8px;
  border-left: 4px solid var(--jp-border-color1);
}

.jp-detllm-summary[data-state='stamped'] {
  border-color: var(--jp-info-color1);
}

.jp-detllm-summary[data-state='partly'] {
  border-color: var(--jp-warn-color1);
}

.jp-detllm-summary[data-state='verified'] {
  border-color: var(--jp-success-color1);
}

.jp-detllm-summary[data-state='failed'] {
  border-color: var(--jp-error-color1);
}

.jp-detllm-panel button {
  padding: 3px 8px;
  border: var(--jp-border-width) solid var(--jp-border-color1);
  border-radius: var(--jp-border-radius);
  background: var(--jp-layout-color2);
  color: var(--jp-ui-font-color1);
  font: inherit;
  cursor: pointer;
}

.jp-detllm-panel button:hover {
  background: var(--jp-layout-color3);
}

.jp-detllm-actions {
  display: flex;
  flex-wrap: wrap;
  gap: 6px;
}

.jp-detllm-panel .jp-detllm-jump {
  padding: 0;
  border: 0;
  background: none;
  color: var(--jp-content-link-color);
  text-align: left;
  text-decoration: underline;
}

.jp-detllm-cells {
  margin: 12px 0 0;
  padding: 0;
  list-style: none;
}

.jp-detllm-cell {
  padding: 8px 0;
  border-top: var(--jp-border-width) solid var(--jp-border-color2);
}

.jp-detllm-head {
  display: flex;
  flex-wrap: wrap;
  align-items: baseline;
  justify-content: space-between;
  gap: 2px 8px;
}

.jp-detllm-verdict {
  font-weight: 600;
}

.jp-detllm-lines {
  display: grid;
  grid-template-columns: max-content minmax(0, 1fr);
  gap: 2px 8px;
  margin: 6px 0;
}

.jp-detllm-lines dt {
  color: var(--jp-ui-font-color2);
}

.jp-detllm-lines dd {
  margin: 0;
  font-family: var(--jp-code-font-family);
  font-size: var(--jp-code-font-size);
  overflow-wrap: anywhere;
  white-space: pre-wrap;
}

.jp-detllm-problem {
  margin: 8px 0 0;
  overflow-wrap: anywhere;
}
`,""]),t.d(r,{},{A:l})},314(e){e.exports=function(e){var r=[];return r.toString=function(){return this.map(function(r){var t="",o=void 0!==r[5];return r[4]&&(t+="@supports (".concat(r[4],") {")),r[2]&&(t+="@media ".concat(r[2]," {")),o&&(t+="@layer".concat(r[5].length>0?" ".concat(r[5]):""," {")),t+=e(r),o&&(t+="}"),r[2]&&(t+="}"),r[4]&&(t+="}"),t}).join("")},r.i=function(e,t,o,a,n){"string"==typeof e&&(e=[[null,e,void 0]]);var l={};if(o)for(var i=0;i<this.length;i++){var p=this[i][0];null!=p&&(l[p]=!0)}for(var d=0;d<e.length;d++){var s=[].concat(e[d]);o&&l[s[0]]||(void 0!==n&&(void 0===s[5]||(s[1]="@layer".concat(s[5].length>0?" ".concat(s[5]):""," {").concat(s[1],"}")),s[5]=n),t&&(s[2]&&(s[1]="@media ".concat(s[2]," {").concat(s[1],"}")),s[2]=t),a&&(s[4]?(s[1]="@supports (".concat(s[4],") {").concat(s[1],"}"),s[4]=a):s[4]="".concat(a)),r.push(s))}},r}},601(e){e.exports=function(e){return e[1]}},72(e){var r=[];function t(e){for(var t=-1,o=0;o<r.length;o++)if(r[o].identifier===e){t=o;break}return t}function o(e,o){for(var a={},n=[],l=0;l<e.length;l++){var i=e[l],p=o.base?i[0]+o.base:i[0],d=a[p]||0,s="".concat(p," ").concat(d);a[p]=d+1;var c=t(s),u={css:i[1],media:i[2],sourceMap:i[3],supports:i[4],layer:i[5]};if(-1!==c)r[c].references++,r[c].updater(u);else{var f=function(e,r){var t=r.domAPI(r);return t.update(e),function(r){r?(r.css!==e.css||r.media!==e.media||r.sourceMap!==e.sourceMap||r.supports!==e.supports||r.layer!==e.layer)&&t.update(e=r):t.remove()}}(u,o);o.byIndex=l,r.splice(l,0,{identifier:s,updater:f,references:1})}n.push(s)}return n}e.exports=function(e,a){var n=o(e=e||[],a=a||{});return function(e){e=e||[];for(var l=0;l<n.length;l++){var i=t(n[l]);r[i].references--}for(var p=o(e,a),d=0;d<n.length;d++){var s=t(n[d]);0===r[s].references&&(r[s].updater(),r.splice(s,1))}n=p}}},659(e){var r={};e.exports=function(e,t){var o=function(e){if(void 0===r[e]){var t=document.querySelector(e);if(window.HTMLIFrameElement&&t instanceof window.HTMLIFrameElement)try{t=t.contentDocument.head}catch(e){t=null}r[e]=t}return r[e]}(e);if(!o)throw Error("Couldn't find a style target. This probably means that the value for the 'insert' parameter is invalid.");o.appendChild(t)}},540(e){e.exports=function(e){var r=document.createElement("style");return e.setAttributes(r,e.attributes),e.insert(r,e.options),r}},56(e,r,t){e.exports=function(e){var r=t.nc;r&&e.setAttribute("nonce",r)}},825(e){e.exports=function(e){if("u"<typeof document)return{update:function(){},remove:function(){}};var r=e.insertStyleElement(e);return{update:function(t){var o,a,n;o="",t.supports&&(o+="@supports (".concat(t.supports,") {")),t.media&&(o+="@media ".concat(t.media," {")),(a=void 0!==t.layer)&&(o+="@layer".concat(t.layer.length>0?" ".concat(t.layer):""," {")),o+=t.css,a&&(o+="}"),t.media&&(o+="}"),t.supports&&(o+="}"),(n=t.sourceMap)&&"u">typeof btoa&&(o+="\n/*# sourceMappingURL=data:application/json;base64,".concat(btoa(unescape(encodeURIComponent(JSON.stringify(n))))," */")),e.styleTagTransform(o,r,e.options)},remove:function(){var e;null===(e=r).parentNode||e.parentNode.removeChild(e)}}}},113(e){e.exports=function(e,r){if(r.styleSheet)r.styleSheet.cssText=e;else{for(;r.firstChild;)r.removeChild(r.firstChild);r.appendChild(document.createTextNode(e))}}},579(e,r,t){var o=t(72),a=t.n(o),n=t(825),l=t.n(n),i=t(659),p=t.n(i),d=t(56),s=t.n(d),c=t(540),u=t.n(c),f=t(113),m=t.n(f),v=t(475),j={};j.styleTagTransform=m(),j.setAttributes=s(),j.insert=p().bind(null,"head"),j.domAPI=l(),j.insertStyleElement=u(),a()(v.A,j),v.A&&v.A.locals&&v.A.locals}}]);